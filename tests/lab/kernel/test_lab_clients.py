"""The official client of Python and lightkube against a lab: list, watch, patch."""

import asyncio
import json

import pytest
from tests.lab.kernel.lab_cluster import CONTROL_PLANES, eventually, running

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module", params=CONTROL_PLANES)
def cluster(request):
    with running("p", "--nodes", "1", *CONTROL_PLANES[request.param]) as made:
        yield made


def pod(name):
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "image": "any", "ports": [{"containerPort": 8080}]}]},
    }  # fmt: skip


def service(name):
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": [{"port": 80, "targetPort": 8080}]},
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_the_official_client(cluster):
    from kubernetes import client, config, watch

    api_client = config.new_client_from_config(str(cluster.kubeconfig))
    with api_client:
        api = client.CoreV1Api(api_client)
        assert [node.metadata.name for node in api.list_node().items] == ["node-1"]
        api.create_namespaced_service("default", service("one"))
        api.create_namespaced_pod("default", pod("one"))
        watching = watch.Watch()
        for event in watching.stream(api.list_namespaced_pod, "default", label_selector="app=one", timeout_seconds=60):
            conditions = event["object"].status.conditions or []
            if any(each.type == "Ready" and each.status == "True" for each in conditions):
                watching.stop()
        found = api.read_namespaced_pod("one", "default")
        assert found.status.pod_ip.startswith("10.244.1.")
        slices = client.DiscoveryV1Api(api_client)
        eventually(lambda: [
            endpoint.addresses for each in slices.list_namespaced_endpoint_slice(
                "default", label_selector="kubernetes.io/service-name=one").items for endpoint in each.endpoints or []
            if endpoint.conditions.ready] == [[found.status.pod_ip]], "the endpoint")  # fmt: skip
        patched = api.patch_namespaced_pod("one", "default", {"metadata": {"labels": {"more": "yes"}}})
        assert patched.metadata.labels == {"app": "one", "more": "yes"}
        with pytest.raises(client.ApiException) as refused:
            api.create_namespaced_service("default", service("one"))
        assert (refused.value.status, json.loads(refused.value.body)["reason"]) == (409, "AlreadyExists")
        api.delete_namespaced_pod("one", "default", grace_period_seconds=0)
        api.delete_namespaced_service("one", "default")


def test_lightkube(cluster, monkeypatch):
    from lightkube import AsyncClient, KubeConfig
    from lightkube.models.core_v1 import Container, PodSpec
    from lightkube.models.meta_v1 import ObjectMeta
    from lightkube.resources.core_v1 import Node, Pod

    async def talk():
        client = AsyncClient(config=KubeConfig.from_file(str(cluster.kubeconfig)))
        try:
            assert [each.metadata.name async for each in client.list(Node)] == ["node-1"]
            made = Pod(metadata=ObjectMeta(name="two", labels={"app": "two"}),
                       spec=PodSpec(containers=[Container(name="c", image="any")]))  # fmt: skip
            await client.create(made, namespace="default")
            async with asyncio.timeout(60):
                async for _, each in client.watch(Pod, namespace="default", labels={"app": "two"}):
                    if any(one.type == "Ready" and one.status == "True" for one in (each.status.conditions or [])):
                        break
            patched = await client.patch(Pod, "two", {"metadata": {"labels": {"more": "yes"}}}, namespace="default")
            assert patched.metadata.labels == {"app": "two", "more": "yes"}
            await client.delete(Pod, "two", namespace="default", grace_period=0)
        finally:
            await client.close()

    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    asyncio.run(talk())
