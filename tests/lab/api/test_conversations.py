"""The official Python client and lightkube against the lab's API over TLS: list, watch, patch, apply, exec and logs."""

import gc
import logging
import socket
import ssl
import threading

import httpx2
import kubernetes
import lightkube
import pytest
from kubernetes.stream import stream
from lightkube.core.exceptions import ApiError
from lightkube.models.core_v1 import ServicePort, ServiceSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap, Namespace, Pod, Service
from lightkube.types import PatchType

from narthex.runtime.http.connection import HttpConnection

from .bare_server import TOKEN, bare


@pytest.fixture
def server(tmp_path):
    with bare(tmp_path) as running:
        yield running


def test_a_response_is_one_write_that_does_not_wait(server, monkeypatch):
    """A second write would wait for the client's delayed ACK, 40 ms on each request."""
    written, write = [], HttpConnection.write

    async def recorded(connection, data):
        delays = connection.writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
        written.append((data.partition(b" ")[0], delays))
        await write(connection, data)

    monkeypatch.setattr(HttpConnection, "write", recorded)
    context = ssl.create_default_context(cafile=str(server.certificate))
    with httpx2.Client(base_url=server.url, verify=context, timeout=60) as client:
        for _ in range(3):
            assert client.get("/api/v1/pods", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert written == [(b"HTTP/1.1", False)] * 3


def pod(name):
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "echo"}]},
    }


@pytest.fixture
def garbage_is_collected():
    """The clients leave sockets and files to the garbage collector, which must not meet them in a later test."""
    yield
    gc.collect()


@pytest.mark.usefixtures("garbage_is_collected")
@pytest.mark.filterwarnings("ignore")
def test_the_official_client(server):
    with kubernetes.config.new_client_from_config(str(server.kubeconfig)) as client:
        core, apps = kubernetes.client.CoreV1Api(client), kubernetes.client.AppsV1Api(client)
        assert [each.metadata.name for each in core.list_namespace().items] == ["default", "kube-system"]
        spec = {"selector": {"app": "web"}, "ports": [{"port": 80}]}
        made = core.create_namespaced_service("default", {"metadata": {"name": "web"}, "spec": spec})
        assert made.spec.cluster_ip.startswith("10.96.") and made.spec.ports[0].target_port == 80
        events = kubernetes.watch.Watch().stream(
            core.list_namespaced_service, "default", resource_version=made.metadata.resource_version, timeout_seconds=60
        )
        core.patch_namespaced_service("web", "default", {"metadata": {"labels": {"a": "b"}}})
        event = next(iter(events))
        assert (event["type"], event["object"].metadata.labels) == ("MODIFIED", {"a": "b"})
        with pytest.raises(kubernetes.client.ApiException) as caught:
            core.read_namespaced_service("none", "default")
        assert caught.value.status == 404
        template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "echo"}]}}
        wanted = {"metadata": {"name": "web"}, "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}}
        apps.create_namespaced_deployment("default", wanted)
        assert apps.patch_namespaced_deployment_scale("web", "default", {"spec": {"replicas": 3}}).spec.replicas == 3
        assert apps.read_namespaced_deployment("web", "default").spec.replicas == 3
        server.create("Pod", pod("one"))
        assert core.read_namespaced_pod_log("one", "default") == "first line\nsecond line\n"
        said = stream(core.connect_get_namespaced_pod_exec, "one", "default", command=["echo", "hello"], stdout=True)
        assert said == "hello\n"


@pytest.mark.usefixtures("garbage_is_collected")
@pytest.mark.filterwarnings("ignore")
def test_lightkube(server):
    client = lightkube.Client(lightkube.KubeConfig.from_file(server.kubeconfig).get())
    assert [each.metadata.name for each in client.list(Namespace)] == ["default", "kube-system"]
    port = ServicePort(port=80, targetPort=8080)
    wanted = Service(metadata=ObjectMeta(name="web"), spec=ServiceSpec(selector={"app": "web"}, ports=[port]))
    made = client.create(wanted)
    assert made.spec.clusterIPs[0].startswith("10.96.")
    events = client.watch(Service, resource_version=made.metadata.resourceVersion, server_timeout=60)
    threading.Thread(
        target=lambda: server.update(
            "Service",
            {
                **server.registry.get("Service", "default", "web"),
                "metadata": {**server.registry.get("Service", "default", "web")["metadata"], "labels": {"a": "b"}},
            },
        )
    ).start()
    kind, seen = next(iter(events))
    assert (kind, seen.metadata.labels) == ("MODIFIED", {"a": "b"})
    ports = {"spec": {"ports": [{"port": 80, "targetPort": 81}]}}
    assert client.patch(Service, "web", ports, patch_type=PatchType.STRATEGIC).spec.ports[0].targetPort == 81
    applied = ConfigMap(metadata=ObjectMeta(name="a"), data={"x": "1"}, apiVersion="v1", kind="ConfigMap")
    assert client.apply(applied, field_manager="me", force=True).data == {"x": "1"}
    with pytest.raises(ApiError, match="Apply failed with 1 conflict"):
        applied.data["x"] = "2"
        client.apply(applied, field_manager="other")
    server.create("Pod", pod("one"))
    assert "".join(client.log("one")) == "first line\nsecond line\n"
    client.delete(Pod, "one")
    assert list(client.list(Pod)) == []


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", f"Basic {TOKEN}"])
def test_nobody_without_the_token(server, authorization, caplog):
    caplog.set_level(logging.ERROR)
    headers = {"Authorization": authorization} if authorization else {}
    with httpx2.Client(verify=ssl.create_default_context(cafile=server.certificate), headers=headers) as client:
        answer = client.get(f"{server.url}/api/v1/namespaces")
        assert answer.status_code == 401 and answer.json()["reason"] == "Unauthorized"


def test_what_is_no_request_gets_an_answer(server):
    with httpx2.Client(
        verify=ssl.create_default_context(cafile=server.certificate), headers={"Authorization": f"Bearer {TOKEN}"}
    ) as client:
        assert client.get(f"{server.url}/nothing/here").status_code == 404
        assert client.get(f"{server.url}/api/v1/pods", headers={"Accept": "text/html"}).status_code == 406
        place = f"{server.url}/api/v1/namespaces/default/configmaps"
        assert client.post(place, content="{", headers={"Content-Type": "application/json"}).status_code == 400
        assert client.post(place, content="x", headers={"Content-Type": "text/plain"}).status_code == 415
        assert client.post(place, content=b"x" * (4 << 20)).status_code == 413
        assert client.put(place, content="{}").status_code == 405
        assert client.get(place, params={"labelSelector": "a in (b"}).status_code == 400
        assert client.get(place, params={"fieldSelector": "spec.nothing=1"}).status_code == 400
        made = client.post(place, json={"metadata": {"name": "a"}, "bogus": 1})
        assert made.status_code == 201 and "unknown field" in made.headers["Warning"]
        strict = client.post(place, params={"fieldValidation": "Strict"}, json={"metadata": {"name": "b"}, "bogus": 1})
        assert strict.status_code == 400 and 'unknown field "bogus"' in strict.json()["message"]
        assert client.get(f"{server.url}/healthz").text == "ok"
