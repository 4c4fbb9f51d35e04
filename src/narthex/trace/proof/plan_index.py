"""Which Service ports have a frontend or an endpoint at an address, as plans follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from narthex.model import ServicePortName
from narthex.netfilter.sets.space import DPORT, PROTOCOL, PacketSpace
from narthex.netfilter.sets.touched import Header, meet
from narthex.netfilter.sets.tracked import chosen
from narthex.netfilter.sets.values import ValueSet, values
from narthex.proxy.plan.ir import FrontendKind, Plan, ServicePlan

Names = tuple[ServicePortName, ...]


class PlanIndex:
    """The Service ports of a plan by the addresses of their frontends and endpoints."""

    def __init__(self, space: PacketSpace, node_port_addresses: ValueSet, *, guarded: bool) -> None:
        """Create an empty index. `guarded`: what a plan decides for other ports of a cluster IP depends on the Service, too."""
        self._space = space
        self._open = node_port_addresses
        self._guarded = guarded
        self._by_address: dict[int, Names] = {}
        self._by_node_port: dict[int, Names] = {}
        self._by_endpoint: dict[int, Names] = {}

    def add(self, service: ServicePlan) -> None:
        """Add a Service port."""
        for index, number in self._places(service):
            held = index.get(number, ())
            if service.name not in held:
                index[number] = (*held, service.name)

    def remove(self, service: ServicePlan) -> None:
        """Remove a Service port."""
        for index, number in self._places(service):
            left = tuple(name for name in index.get(number, ()) if name != service.name)
            if left:
                index[number] = left
            else:
                index.pop(number, None)

    def _places(self, service: ServicePlan) -> Iterator[tuple[dict[int, Names], int]]:
        address = self._space.address
        for frontend in service.frontends:
            if frontend.address is None:
                yield self._by_node_port, frontend.port
            else:
                yield self._by_address, address(frontend.address)
        for text in {end.address for pool in service.pools.values() for end in pool.endpoints}:
            yield self._by_endpoint, address(text)

    def region(self, service: ServicePlan) -> Iterator[Header]:
        """Yield the packets whose treatment depends on a Service port."""
        whole = self._space.whole
        for frontend in service.frontends:
            protocol, port = values(frontend.protocol.number), values(frontend.port)
            if frontend.address is None:
                yield self._open, protocol, port
            elif frontend.kind is FrontendKind.CLUSTER_IP and self._guarded:
                yield values(self._space.address(frontend.address)), whole[PROTOCOL], whole[DPORT]
            else:
                yield values(self._space.address(frontend.address)), protocol, port

    def at(self, headers: Iterable[Header]) -> set[ServicePortName]:
        """Return the Service ports that packets may be for, and those with the same address."""
        found: set[ServicePortName] = set()
        for addresses, _, ports in headers:
            for names in chosen(self._by_address, addresses):
                found.update(names)
            if addresses & self._open:
                for names in chosen(self._by_node_port, ports):
                    found.update(names)
        return found

    def behind(self, header: Header, plan: Plan) -> Iterator[ServicePlan]:
        """Yield the Service ports that have an endpoint that receives packets with this header."""
        for names in chosen(self._by_endpoint, header[0]):
            for name in names:
                service = plan.services[name]
                ends = (end for pool in service.pools.values() for end in pool.endpoints)
                protocol = values(name.protocol.number)
                if any(
                    meet(header, (values(self._space.address(end.address)), protocol, values(end.port))) for end in ends
                ):
                    yield service
