"""The objects of another API server, which here is the lab's own behind a socket."""

import base64

import pytest
from tests.lab.api.bare_server import bare

from narthex.lab import cluster
from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import ApiRequest
from narthex.lab.controllers.controller_manager import ControllerManager
from narthex.lab.controllers.ingress.controller import IngressController
from narthex.lab.program.controller_loop import ControllerLoop
from narthex.lab.program.external_controllers import ExternalControllers
from narthex.lab.program.remote_registry import COPIED, RemoteObjects, status_patch
from narthex.lab.topology import INGRESS_ADDRESSES

POD = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"containers": [{"name": "c", "image": "web"}], "nodeName": "node-1"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with bare(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture(scope="module")
def remote(server):
    made = RemoteObjects(None, str(server.kubeconfig), cluster.custom_resource_definitions())
    made.connect()
    yield made
    made.close()


def test_it_has_what_the_server_has(remote):
    with remote.shared.held() as registry:
        assert [each["metadata"]["name"] for each in registry.list("Namespace")] == ["default", "kube-system"]
        assert all(each["kind"] == "Namespace" and each["apiVersion"] == "v1" for each in registry.list("Namespace"))
        # Kinds without a copy are read at the server.
        assert "Event" not in COPIED
        assert registry.list("Event") == []
        assert registry.get("Event", "default", "none") is None
        assert registry.kinds["IPAddressPool.metallb.io"].plural == "ipaddresspools"


def test_who_writes_reads_it_at_once(remote):
    with remote.shared.held() as registry:
        for number in range(20):
            name = f"one-{number}"
            registry.create("ConfigMap", {"metadata": {"name": name, "namespace": "default"}, "data": {"a": "1"}})
            held = registry.get("ConfigMap", "default", name)
            registry.update("ConfigMap", {**held, "data": {"a": "2"}})
            assert registry.get("ConfigMap", "default", name)["data"] == {"a": "2"}
            assert registry.delete("ConfigMap", "default", name) is None
            assert registry.get("ConfigMap", "default", name) is None


def test_what_another_has_created_since_exists(server, remote):
    """While the registry is held, its copy does not change."""
    space = {"metadata": {"name": "shop"}}
    with remote.shared.held() as registry:
        server.create("Namespace", space)
        assert registry.get("Namespace", "", "shop") is None
        registry.ensure("Namespace", space)
        registry.ensure("Namespace", {"metadata": {"name": "bank"}})
    with remote.shared.held() as registry:
        assert {"shop", "bank"} <= {each["metadata"]["name"] for each in registry.list("Namespace")}
        registry.delete("Namespace", "", "shop")
        registry.delete("Namespace", "", "bank")


def test_the_lab_s_controller_of_ingresses_works_with_another_control_plane(server, remote):
    loop = ControllerLoop(remote.shared, ControllerManager([IngressController()]))
    backend = {"service": {"name": "web", "port": {"number": 80}}}
    server.create("Ingress", {"metadata": {"name": "web", "namespace": "default"}, "spec": {"defaultBackend": backend}})
    with remote.shared.held() as registry:
        # The copy has what was there before.
        registry.create("ConfigMap", {"metadata": {"name": "later", "namespace": "default"}})
    loop.reconcile()
    with remote.shared.held() as registry:
        status = registry.get("Ingress", "default", "web")["status"]
        reasons = [each["reason"] for each in registry.list("Event", "default")]
    assert status["loadBalancer"] == {"ingress": [{"ip": address} for address in INGRESS_ADDRESSES]}
    assert reasons == ["BackendNotFound"]


def test_changes_of_others_arrive_in_order_and_wake_listeners(server, remote):
    woken = []
    remote.shared.listen(lambda: woken.append(True))
    with remote.shared.held() as registry:
        before = registry.version
    for number in range(3):
        server.create("Secret", {"metadata": {"name": f"s-{number}", "namespace": "default"}})
    with remote.shared.held() as registry:
        registry.create("Secret", {"metadata": {"name": "last", "namespace": "default"}})
        names = [each.key[1] for each in registry.changes_since(before) if each.kind == "Secret"]
    assert names == ["s-0", "s-1", "s-2", "last"]
    assert woken


def test_a_status_leaves_the_conditions_of_others(server, remote):
    server.create("Pod", POD)
    with remote.shared.held() as registry:
        registry.create("Secret", {"metadata": {"name": "after-the-pod", "namespace": "default"}})
        held = registry.get("Pod", "default", "web")
        stale = {**held, "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}
        gate = {"type": "example.com/gate", "status": "True"}
        server.update("Pod", {**held, "status": {"conditions": [gate]}}, subresource="status")
        written = registry.update("Pod", stale, subresource="status")
    assert {each["type"] for each in written["status"]["conditions"]} == {"Ready", "example.com/gate"}
    assert written["status"]["phase"] == "Running"


def test_errors_are_those_of_the_server(remote):
    with remote.shared.held() as registry:
        with pytest.raises(StatusError, match="already exists") as refused:
            registry.create("Namespace", {"metadata": {"name": "default"}})
        assert refused.value.code == 409
        with pytest.raises(StatusError, match="not found"):
            registry.delete("Pod", "default", "nobody")
    missing = remote.api.answer(ApiRequest("GET", "/api/v1/namespaces/default/pods/nobody", {}, {}))
    assert missing.status == 404


def test_the_lock_is_free_while_the_server_is_asked(remote):
    with remote.shared.held(), remote.shared.held() as registry, remote.shared.released():
        assert remote.shared.lock.acquire(blocking=False)
        remote.shared.lock.release()
        assert registry.get("Namespace", "", "default")


@pytest.mark.parametrize(
    ("before", "after", "patch"),
    [
        ({"phase": "Pending"}, {"phase": "Running"}, {"phase": "Running"}),
        ({"phase": "Running", "reason": "x"}, {"phase": "Running"}, {"reason": None}),
        ({"conditions": [{"type": "A"}]}, {"conditions": [{"type": "A"}]}, {}),
        (
            {"conditions": [{"type": "A"}, {"type": "B", "status": "False"}]},
            {"conditions": [{"type": "A"}, {"type": "B", "status": "True"}]},
            {"conditions": [{"type": "B", "status": "True"}]},
        ),
        ({"conditions": [{"type": "A"}, {"type": "B"}]}, {"conditions": [{"type": "A"}]}, {}),
        ({}, {"podIPs": [{"ip": "10.0.0.1"}]}, {"podIPs": [{"ip": "10.0.0.1"}]}),
    ],
)
def test_a_status_patch_has_what_changes(before, after, patch):
    assert status_patch(before, after) == patch


def test_controllers_are_idle_once_their_work_shows_in_the_objects(server, remote):
    controllers = ExternalControllers(remote.shared)
    labels = {"app": "idle"}
    service = {"spec": {"selector": labels, "ports": [{"port": 80}]}}
    meta = {"namespace": "default"}

    def seen():
        with remote.shared.held() as registry:
            registry.create("Secret", {"metadata": {"generateName": "seen-", "namespace": "default"}})
        return controllers.idle

    assert seen()
    server.create("Service", {**service, "metadata": {**meta, "name": "idle"}})
    assert seen()
    pod = server.create("Pod", {**POD, "metadata": {**meta, "name": "idle", "labels": labels}})
    assert seen()
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    server.update("Pod", {**pod, "status": ready}, subresource="status")
    assert not seen()
    endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"kind": "Pod", "name": "idle"}}
    slice_meta = {**meta, "name": "idle-1", "labels": {"kubernetes.io/service-name": "idle"}}
    server.create(
        "EndpointSlice", {"metadata": slice_meta, "addressType": "IPv4", "endpoints": [endpoint], "ports": []}
    )
    assert seen()
    server.create("Pod", {"metadata": {**meta, "name": "new"}, "spec": {"containers": POD["spec"]["containers"]}})
    assert not seen()


def test_values_of_secrets_are_as_the_server_stores_them(remote):
    data = {"word": base64.b64encode(b"secret").decode()}
    with remote.shared.held() as registry:
        made = registry.create("Secret", {"metadata": {"generateName": "x-", "namespace": "default"}, "data": data})
        assert registry.get("Secret", "default", made["metadata"]["name"])["data"] == data
