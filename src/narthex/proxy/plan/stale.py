"""Finds stale connections: those that lead where a Service no longer leads (group 18, row 29.3).

Connections are those that the kernel tracks, and UDP sockets that were connected to an endpoint in the place of a
Service address. Both are described as a `ConntrackFlow`.

A connection keeps its endpoint for as long as the kernel tracks it, and UDP has no end. The packets of an entry whose
endpoint is gone are lost. Compared with kube-proxy, the search is narrower in one way and wider in two:

* Entries of a node port are searched on the node's own addresses only (row 29.4).
* TCP and SCTP count, too, once the endpoint is gone from the Service. An endpoint that is listed but not serving may
  still finish its connections (row 3.11); UDP, which has nothing to finish, leaves it (row 18.2).
* Entries of deleted frontends count if they lead to an endpoint that the frontend had.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

from narthex.model import ConntrackFlow, Protocol, ServicePortName, contains, family_of, in_any
from narthex.proxy.plan.ir import Frontend, Match, NodePorts, Plan, ServicePlan

Place = tuple[str, int]
"""Address and port."""


class StaleReason(enum.Enum):
    """Why an entry is stale; the value is the label of a metric."""

    ENDPOINT_GONE = "endpoint-gone"
    """The frontend exists, its endpoint does not."""
    FRONTEND_GONE = "frontend-gone"
    """The Service or the frontend no longer exists."""
    BLACK_HOLE = "black-hole"
    """UDP to a frontend that was never translated to an endpoint: it began before there were rules (row 18.5)."""


class MatchOwners:
    """The Service port of each match, kept from plan to plan after first use.

    It avoids a pass over all Services for each search in clusters where connections lose their endpoints all the time.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        """The plan of `_known`, after first use."""
        self._known: dict[Match, ServicePlan] = {}

    def of(self, plan: Plan) -> Mapping[Match, ServicePlan]:
        """Return the Service ports of a plan by match."""
        if self._plan is not plan:
            self._plan, self._known = plan, _owners(plan)
        return self._known

    def follow(self, plan: Plan) -> None:
        """Advance to the next plan. Costs what differs."""
        before = self._plan
        if before is None or before is plan:
            return
        if plan.lineage.parent != before.lineage.number:
            self._plan, self._known = None, {}
            return
        for name in plan.lineage.changed:
            for front in _frontends(before.services.get(name)):
                del self._known[front.match]
        for name in plan.lineage.changed:
            service = plan.services.get(name)
            self._known.update((front.match, service) for front in _frontends(service) if service is not None)
        self._plan = plan


def _frontends(service: ServicePlan | None) -> tuple[Frontend, ...]:
    return service.frontends if service is not None else ()


class StaleSearch:
    """What to search for after the kernel advanced from one plan to another, for one family."""

    def __init__(
        self,
        plan: Plan,
        before: Plan | None,
        changed: Iterable[ServicePortName],
        *,
        everything: bool = False,
        relayed: bool = False,
        gentle: bool = False,
        owners: MatchOwners | None = None,
    ) -> None:
        """Prepare the search.

        Args:
            plan: The plan in force.
            before: The plan that was in force; None: unknown.
            changed: The Service ports that differ.
            everything: Changes may have been missed, so each Service port is searched, as when the node proxy starts.
            relayed: Connections to this node lead to a relay, which ends its connections itself.
            gentle: TCP connections to endpoints that leave a Service continue until they end (row 24.8).
            owners: Kept from search to search.
        """
        self._plan = plan
        self._gentle = gentle
        self._relayed = relayed
        self._matches: set[Match] = set()
        self._left: set[Place] = set()
        """Endpoints of UDP that lost a frontend, or that their Service port lost."""
        self._near: dict[Match, ServicePlan] = {}
        """Who has the match now, among the Service ports that are looked at."""
        self._former: dict[Match, ServicePlan] = {}
        """Who had it before."""
        self._owners = owners if owners is not None else MatchOwners()
        self._alive: dict[ServicePortName, frozenset[Place]] = {}
        self._unseen = [each for each in (before, plan) if each is not None] if everything else []
        """Plans of which each Service port is to be looked at, once there is a connection that asks for it."""
        for name in () if everything else set(changed):
            self._look_at(before.services.get(name) if before else None, plan.services.get(name))

    def _look_at(self, old: ServicePlan | None, new: ServicePlan | None) -> None:
        had = dict.fromkeys((front.match for front in old.frontends), old) if old else {}
        has = dict.fromkeys((front.match for front in new.frontends), new) if new else {}
        if old is not None and old.name.protocol is Protocol.UDP:
            kept = _alive(new) if new is not None and had.keys() <= has.keys() else frozenset()
            self._left |= _places(old, serving_only=False) - kept
        self._former.update((match, each) for match, each in had.items() if each)
        self._near.update((match, each) for match, each in has.items() if each)
        if _lost(old, new):
            self._matches.update(had, has)
            return
        self._matches.update(had.keys() - has.keys())
        if new is not None and new.name.protocol is Protocol.UDP:
            filled = old is not None and not old.serving and new.serving
            self._matches.update(has if filled else has.keys() - had.keys())

    @property
    def towards(self) -> frozenset[tuple[Protocol, int]]:
        """Protocols and ports that a stale entry can have as its destination; empty: there is no stale entry."""
        fronts = [front for plan in self._unseen for service in plan.services.values() for front in service.frontends]
        return frozenset(
            [(protocol, port) for _, protocol, port in self._matches]
            + [(front.protocol, front.port) for front in fronts]
        )

    @property
    def left(self) -> frozenset[Place] | None:
        """Return the endpoints to which a UDP socket may be connected that a Service led there and no longer does.

        None: any endpoint. To be asked before `reason`.
        """
        return None if self._unseen else frozenset(self._left)

    def reason(self, flow: ConntrackFlow, own: Collection[str]) -> StaleReason | None:
        """Return why the entry is stale; None if it is not, or not ours. `own` are all addresses of this node."""
        if self._unseen:
            *before, now = map(_owners, self._unseen)
            self._near, self._former = now, before[0] if before else {}
            self._matches.update(self._near, self._former)
            self._unseen = []
        exact: Match = (flow.destination, flow.protocol, flow.port)
        node: Match | None = (None, flow.protocol, flow.port)
        if exact not in self._matches:
            if node not in self._matches or not _takes_node_ports(self._plan.node_ports, flow.destination, own):
                return None
            if self._judge(flow, own, self._near.get(node), self._former.get(node)) is None:
                return None
        elif self._judge(flow, own, self._near.get(exact), self._former.get(exact)) is None:
            return None
        # Only now the slow look at all Service ports: another one may have the very address, or the node port.
        node = node if _takes_node_ports(self._plan.node_ports, flow.destination, own) else None
        owner, former = self._all().get(exact), self._former.get(exact)
        if node is not None:
            owner, former = owner or self._all().get(node), former or self._former.get(node)
        return self._judge(flow, own, owner, former)

    def _judge(
        self, flow: ConntrackFlow, own: Collection[str], owner: ServicePlan | None, former: ServicePlan | None
    ) -> StaleReason | None:
        if self._relayed and flow.translated and flow.reply_source in own:
            return _gone_from_the_relay(flow, owner, former)
        to = flow.reply_source, flow.reply_port
        if owner is None:
            gone = flow.translated and former is not None and to in _places(former, serving_only=False)
            return StaleReason.FRONTEND_GONE if gone else None
        alive = self._alive.get(owner.name)
        if alive is None:
            alive = self._alive[owner.name] = _alive(owner)
        if to in alive or (self._gentle and flow.protocol is Protocol.TCP):
            return None
        if flow.translated:
            return StaleReason.ENDPOINT_GONE
        return StaleReason.BLACK_HOLE if flow.protocol is Protocol.UDP else None

    def _all(self) -> Mapping[Match, ServicePlan]:
        return self._owners.of(self._plan)


def _owners(plan: Plan) -> dict[Match, ServicePlan]:
    return {front.match: service for service in plan.services.values() for front in service.frontends}


def _gone_from_the_relay(
    flow: ConntrackFlow, owner: ServicePlan | None, former: ServicePlan | None
) -> StaleReason | None:
    """Return the reason if a UDP entry leads to a port that the relay has given up (row 18.11)."""
    if flow.protocol is not Protocol.UDP or former is None or (owner is not None and owner.name == former.name):
        return None
    return StaleReason.FRONTEND_GONE


def _lost(old: ServicePlan | None, new: ServicePlan | None) -> bool:
    """Return True if a connection may have lost its endpoint."""
    return old is not None and (new is None or not _alive(old) <= _alive(new))


def _alive(service: ServicePlan) -> frozenset[Place]:
    """Return the endpoints to which connections of this Service port may continue."""
    return _places(service, serving_only=service.name.protocol is Protocol.UDP)


def _places(service: ServicePlan, *, serving_only: bool) -> frozenset[Place]:
    ends = service.serving if serving_only else (*service.serving, *service.not_serving)
    return frozenset((end.address, end.port) for end in ends)


def _takes_node_ports(node_ports: NodePorts, address: str, own: Collection[str]) -> bool:
    """Return True if node ports answer on the address (rows 9.1 to 9.10)."""
    if address not in own or (node_ports.cidrs is not None and not in_any(node_ports.cidrs, address)):
        return False
    return node_ports.localhost or not contains(family_of(address).loopback, address)
