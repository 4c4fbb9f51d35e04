"""Which Service ports have a frontend or an endpoint at an address, as plans follow each other."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from narthex.model import ServicePortName
from narthex.netfilter.sets.numbered import NumberedItems
from narthex.netfilter.sets.space import DPORT, PROTOCOL, PacketSpace
from narthex.netfilter.sets.touched import Header, meet
from narthex.netfilter.sets.values import ValueSet, values
from narthex.proxy.plan.ir import FrontendKind, Plan, ServicePlan

Names = tuple[ServicePortName, ...]


class _Place(enum.Enum):
    """Where a Service port has a number."""

    ADDRESS = "a frontend's address"
    NODE_PORT = "a node port"
    ENDPOINT = "an endpoint's address"


class PlanIndex:
    """The Service ports of a plan by the addresses of their frontends and endpoints."""

    def __init__(self, space: PacketSpace, node_port_addresses: ValueSet, *, guarded: bool) -> None:
        """Create an empty index. `guarded`: what a plan decides for other ports of a cluster IP depends on the Service, too."""
        self._space = space
        self._open = node_port_addresses
        self._guarded = guarded
        self._places: dict[_Place, NumberedItems[Names]] = {place: NumberedItems() for place in _Place}

    def fill(self, services: Iterable[ServicePlan]) -> None:
        """Add all Service ports to an empty index."""
        found: dict[_Place, dict[int, Names]] = {place: {} for place in _Place}
        for service in services:
            for place, number in self._numbers(service):
                held = found[place].get(number, ())
                found[place][number] = held if service.name in held else (*held, service.name)
        self._places = {place: NumberedItems(items) for place, items in found.items()}

    def replace(self, before: ServicePlan | None, after: ServicePlan | None) -> None:
        """Replace a Service port; None: it was not there, or is not there any more."""
        old = set(self._numbers(before)) if before is not None else set()
        new = set(self._numbers(after)) if after is not None else set()
        for place, number in old - new:
            assert before is not None
            left = tuple(name for name in self._places[place].get(number) or () if name != before.name)
            self._places[place] = self._places[place].with_item(number, left or None)
        for place, number in new - old:
            assert after is not None
            held = self._places[place].get(number) or ()
            self._places[place] = self._places[place].with_item(number, (*held, after.name))

    def _numbers(self, service: ServicePlan) -> Iterator[tuple[_Place, int]]:
        address = self._space.address
        for frontend in service.frontends:
            if frontend.address is None:
                yield _Place.NODE_PORT, frontend.port
            else:
                yield _Place.ADDRESS, address(frontend.address)
        for text in {end.address for pool in service.pools.values() for end in pool.endpoints}:
            yield _Place.ENDPOINT, address(text)

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
            for names in self._places[_Place.ADDRESS].chosen(addresses):
                found.update(names)
            if addresses & self._open:
                for names in self._places[_Place.NODE_PORT].chosen(ports):
                    found.update(names)
        return found

    def with_endpoint(self, address: int) -> Names:
        """Return the Service ports that have an endpoint at an address."""
        return self._places[_Place.ENDPOINT].get(address) or ()

    def behind(self, header: Header, plan: Plan) -> Iterator[ServicePlan]:
        """Yield the Service ports that have an endpoint that receives packets with this header."""
        for names in self._places[_Place.ENDPOINT].chosen(header[0]):
            for name in names:
                service = plan.services[name]
                ends = (end for pool in service.pools.values() for end in pool.endpoints)
                protocol = values(name.protocol.number)
                if any(
                    meet(header, (values(self._space.address(end.address)), protocol, values(end.port))) for end in ends
                ):
                    yield service
