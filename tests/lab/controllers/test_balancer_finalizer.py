"""The finalizer of load balancers: with addresses, while the type is LoadBalancer, and until the deletion."""

from narthex.lab.cluster import custom_resource_definitions
from narthex.lab.controllers.service.balancer_finalizer import FINALIZER, POOL

from .world import World


def service(**spec):
    ports = [{"port": 80}]
    return {"metadata": {"name": "web", "namespace": "shop"}, "spec": {"type": "LoadBalancer", "ports": ports, **spec}}


def world_with(service, pool=True):
    world = World()
    world.registry.create("Service", service)
    if pool:
        where = {"name": "lab-1", "namespace": "other"}
        for definition in custom_resource_definitions():
            world.registry.create("CustomResourceDefinition", definition)
        world.registry.create(POOL, {"metadata": where, "spec": {"addresses": ["192.0.2.0/28"]}})
    world.settle()
    return world


def finalizers(world):
    return world.registry.get("Service", "shop", "web")["metadata"].get("finalizers")


def test_a_load_balancer_has_it():
    assert finalizers(world_with(service())) == [FINALIZER]


def test_without_addresses_or_for_others_there_is_none():
    assert finalizers(world_with(service(), pool=False)) is None
    assert finalizers(world_with(service(loadBalancerClass="example.com/other"))) is None
    assert finalizers(world_with(service(type="NodePort"))) is None


def test_another_type_takes_it_away():
    world = world_with(service())
    found = world.registry.get("Service", "shop", "web")
    world.registry.update("Service", {**found, "spec": {**found["spec"], "type": "ClusterIP"}})
    world.settle()
    assert finalizers(world) is None


def test_a_deletion_ends():
    world = world_with(service())
    world.registry.delete("Service", "shop", "web")
    world.settle()
    assert world.registry.get("Service", "shop", "web") is None
