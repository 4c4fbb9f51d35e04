"""Each namespace gets ServiceAccount `default` and ConfigMap `kube-root-ca.crt`."""

from narthex.lab.controllers.namespace_objects import ROOT_CA, SERVICE_ACCOUNT, root_ca

from .world import World


def with_certificate(text="CERTIFICATE"):
    world = World()
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kube-system"}}
    world.registry.create("Namespace", namespace)
    world.registry.create("ConfigMap", root_ca("kube-system", text))
    world.settle()
    return world


def found(world, kind, name):
    return {each["metadata"]["namespace"] for each in world.registry.list(kind) if each["metadata"]["name"] == name}


def test_namespaces_have_an_account_and_the_certificate():
    world = with_certificate()
    names = {each["metadata"]["name"] for each in world.registry.list("Namespace")}
    assert found(world, "ServiceAccount", SERVICE_ACCOUNT) == found(world, "ConfigMap", ROOT_CA) == names
    assert world.registry.get("ConfigMap", "shop", ROOT_CA)["data"] == {"ca.crt": "CERTIFICATE"}


def test_they_return_after_a_deletion_or_a_change():
    world = with_certificate()
    world.registry.delete("ServiceAccount", "shop", SERVICE_ACCOUNT)
    world.registry.delete("ConfigMap", "shop", ROOT_CA)
    other = world.registry.get("ConfigMap", "other", ROOT_CA)
    world.registry.update("ConfigMap", {**other, "data": {"ca.crt": "changed"}})
    world.settle()
    assert world.registry.get("ServiceAccount", "shop", SERVICE_ACCOUNT) is not None
    assert {world.registry.get("ConfigMap", each, ROOT_CA)["data"]["ca.crt"] for each in ("shop", "other")} == {
        "CERTIFICATE"
    }


def test_a_new_certificate_reaches_all_namespaces():
    world = with_certificate()
    world.registry.update("ConfigMap", root_ca("kube-system", "NEW"))
    world.settle()
    assert {each["data"]["ca.crt"] for each in world.registry.list("ConfigMap")} == {"NEW"}


def test_nothing_is_written_without_a_certificate_or_into_an_ending_namespace():
    world = World()
    assert world.registry.list("ConfigMap") == []
    world.registry.create("ConfigMap", {"metadata": {"name": "held", "namespace": "shop", "finalizers": ["a/b"]}})
    world.registry.delete("Namespace", "", "shop")
    world.settle()
    assert found(world, "ServiceAccount", SERVICE_ACCOUNT) == {"other", "default", "kube-node-lease"}
