"""A rollout as a Deployment does it, on the endpoints of a small cluster."""

from typing import Any

from tests.proxy.kernel.small_cluster import SmallCluster, service, slices

from narthex.model.net import join_port
from narthex.testing.load import Load

MEETINGS = 60
"""Connections that miss one of three endpoints by luck with a chance of 1 in thirty billion."""


def name_of(address: str) -> str:
    """The name by which an endpoint answers."""
    return join_port(address, 8080)


class Deployment:
    """Pods in the order that a rollout would do things in: a new one serves before it is told of; an old one is told
    of as terminating while it still serves, its clients leave it, and it ends when nobody is left."""

    def __init__(self, cluster: SmallCluster, load: Load, **spec: Any) -> None:
        self.cluster, self.load, self.spec = cluster, load, spec
        self.states: dict[str, str] = {}

    def publish(self) -> None:
        self.cluster.put("web", service(**self.spec), *slices(self.states))

    def begin(self, *addresses: str) -> None:
        """The first pods, before there is a proxy."""
        self.cluster.serve(*addresses)
        self.states.update(dict.fromkeys(addresses, "ready"))
        self.publish()

    def add(self, *addresses: str) -> None:
        self.begin(*addresses)
        for address in addresses:
            before = self.load.endpoints[name_of(address)]
            self.cluster.wait(lambda: self.load.endpoints[name_of(address)] > before, f"connections to {address}")  # noqa: B023

    def terminate(self, *addresses: str) -> None:
        """New connections go elsewhere, while there is an elsewhere; those that are open go on."""
        self.states.update(dict.fromkeys(addresses, "terminating"))
        self.publish()
        self.cluster.wait(lambda: not self.any_met(addresses), f"the rules without {addresses}")

    def any_met(self, addresses: tuple[str, ...]) -> bool:
        """Whether one of these endpoints gets any of the next connections."""

        def met() -> int:
            return sum(self.load.endpoints[name_of(address)] for address in addresses)

        before, made = met(), self.load.made
        self.cluster.wait(lambda: met() > before or self.load.made > made + MEETINGS, "more connections")
        return met() > before

    def remove(self, *addresses: str) -> None:
        """The pods are gone for good once their last client is."""
        answers = self.cluster.answers
        for address in addresses:
            self.load.leave(name_of(address))
            self.cluster.wait(lambda: not answers.open_connections(name_of(address)), "the last client")  # noqa: B023
            closed = answers.close(name_of(address))
            assert closed == 0, f"{closed} connections of {address} were open"
            del self.states[address]
        self.publish()
