"""Changes for packets between two ways of serving the same cluster, and their reasons.

The two differ in factors: settings and deviations. The outcome of a packet with one factor exchanged, and with one after the other,
shows which factors matter for it, so that no pair of modes needs code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

import msgspec

from narthex.model import Disposition, Host, IPFamily, Memory, Packet, Snapshot, Trace, join_port
from narthex.proxy.plan.ir import Deviation, Plan, Pool, Sender, ServicePlan
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.trace.evaluate import evaluate
from narthex.trace.reports.migration.sample_packets import FrontendIndex, SamplePacket, SamplePackets, Shape

_WORDS = {
    Disposition.REJECTED: "refused",
    Disposition.DROPPED: "dropped silently",
    Disposition.NOT_OURS: "left alone",
    Disposition.UNSUPPORTED: "unknown",
}

_End = tuple[Disposition, tuple[str, int] | None, bool]
_Ends = dict[_End, Fraction]


class ServingState(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, and the deviations of the dataplane that implements it."""

    plan: Plan
    deviations: frozenset[Deviation] = frozenset()


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """One difference between two ways of serving."""

    reason: str
    alone: ServingState
    """The first state with only this factor exchanged."""
    so_far: ServingState
    """The first state with this and all earlier factors exchanged; for the last factor it is the second state."""


class PathChange(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome before and after, for one Service port, kind of arrival, and class of sender."""

    service: str
    """The Service port; empty for none."""
    arrival: str
    sender: Sender
    source: str = ""
    """Other relevant properties of the source; empty if there are none."""
    before: str
    after: str
    reasons: tuple[str, ...]
    example: Packet


def compare(before: ServingState, factors: Sequence[Factor], host: Host) -> Iterator[PathChange]:
    """Return all changes that the factors cause together, in a stable order, for one node and IP family."""
    if not factors:
        return
    states = _States(before, factors, host)
    probes = SamplePackets([states.before.atlas, states.after.atlas], host)
    known: dict[Shape, list[PathChange]] = {}
    for name in probes.names():
        shape = probes.shape(name)
        if shape not in known:
            known[shape] = [
                *states.changes(probes.of_service(name)),
                *states.of_returns(probes.of_returning_clients(name)),
            ]
        yield from _for(str(name), known[shape])
    for shape, address, kind, services in probes.places():
        if shape not in known:
            known[shape] = list(states.changes(probes.of_place(address, kind)))
        for service in services:
            yield from _for(service, known[shape])
    yield from states.changes(probes.of_service_cidrs())


def _for(service: str, changes: Iterable[PathChange]) -> Iterator[PathChange]:
    """Return the changes of one Service port for another of the same shape."""
    return (msgspec.structs.replace(change, service=service) for change in changes)


class _Served:
    def __init__(self, serving: ServingState, host: Host) -> None:
        self.atlas = FrontendIndex(serving.plan)
        self._deviations = serving.deviations
        self._host = host

    def trace(self, packet: Packet, memory: Memory | None = None, now: float = 0.0) -> Trace:
        """Return the outcomes of a packet."""
        return evaluate(self.atlas.around(packet), packet, self._host, self._deviations, memory, now)

    def owner(self, packet: Packet) -> ServicePlan | None:
        """Return the Service port that a packet is for."""
        asked = packet.protocol, packet.port
        return self.atlas.owner((packet.destination, *asked)) or self.atlas.owner((None, *asked))

    def affinity(self, packet: Packet) -> int:
        """Return for how many seconds the Service port remembers a client."""
        owner = self.owner(packet)
        return (owner.affinity_seconds if owner else None) or 0


class _Fate(msgspec.Struct, frozen=True):
    """The question where a packet can end, and with which probabilities."""

    packet: Packet

    def __call__(self, served: _Served) -> _Ends:
        return served.trace(self.packet).ends()


class _Stays(msgspec.Struct, frozen=True):
    """The question how likely a client reaches the same endpoint again."""

    first: Packet
    second: Packet
    later: float

    def __call__(self, served: _Served) -> Fraction:
        stays = Fraction(0)
        for outcome in served.trace(self.first, Memory()).outcomes:
            memory = Memory()
            for name, key in outcome.remembers:
                memory.touch(name, key, 0.0)
            again = served.trace(self.second, memory, self.later).outcomes
            stays += outcome.probability * sum(each.probability for each in again if each.endpoint == outcome.endpoint)
        return stays


class _States:
    def __init__(self, before: ServingState, factors: Sequence[Factor], host: Host) -> None:
        self.before = _Served(before, host)
        self._factors = [
            (factor.reason, _Served(factor.alone, host), _Served(factor.so_far, host)) for factor in factors
        ]
        self.after = self._factors[-1][2]

    def changes(self, probes: Iterable[SamplePacket]) -> Iterator[PathChange]:
        """Yield the sample packets whose outcome changes."""
        for probe in probes:
            fate = _Fate(probe.packet)
            one, other = fate(self.before), fate(self.after)
            if one != other:
                service = self.before.owner(probe.packet) or self.after.owner(probe.packet)
                yield _change(probe, *_in_words(one, other, service, probe.packet), self.reasons(fate))

    def of_returns(self, pairs: Iterable[tuple[SamplePacket, SamplePacket]]) -> Iterator[PathChange]:
        """Yield changes of session affinity that no single packet shows."""
        for first, second in pairs:
            if not all(_Fate(each.packet)(self.before) == _Fate(each.packet)(self.after) for each in (first, second)):
                continue
            for returns, later in _returns(self.before.affinity(second.packet)):
                stays = _Stays(first.packet, second.packet, later)
                one, other = stays(self.before), stays(self.after)
                if one != other:
                    arrival = f"{second.arrival}, for a client {returns} from {first.arrival}"
                    probe = msgspec.structs.replace(second, arrival=arrival)
                    yield _change(probe, _again(one), _again(other), self.reasons(stays))

    def reasons(self, fate: Callable[[_Served], object]) -> tuple[str, ...]:
        """Return the factors that matter for a question: exchanged alone, or after the others."""
        found = []
        untouched = last = fate(self.before)
        for reason, alone, so_far in self._factors:
            now = fate(so_far)
            if now != last or fate(alone) != untouched:
                found.append(reason)
            last = now
        return tuple(found)


def _returns(seconds: int) -> Iterator[tuple[str, float]]:
    """Yield when clients return: within the affinity timeout, and after it."""
    yield "back in time", seconds / 2
    yield "back too late", seconds + 1.0


def _again(probability: Fraction) -> str:
    if probability in (0, 1):
        return "the same endpoint again" if probability else "never the same endpoint again"
    return f"the same endpoint again with probability {probability}"


def _change(probe: SamplePacket, before: str, after: str, reasons: tuple[str, ...]) -> PathChange:
    same = {name: getattr(probe, name) for name in ("service", "arrival", "sender", "source")}
    return PathChange(**same, before=before, after=after, reasons=reasons, example=probe.packet)


def _in_words(before: _Ends, after: _Ends, service: ServicePlan | None, packet: Packet) -> tuple[str, str]:
    """Return both outcomes as different texts."""
    one, two = _said(before, service, packet), _said(after, service, packet)
    return (one, two) if one != two else (f"{one} ({_probabilities(before)})", f"{two} ({_probabilities(after)})")


def _said(ends: _Ends, service: ServicePlan | None, packet: Packet) -> str:
    parts = sorted({_WORDS[what] for what, _, _ in ends if what is not Disposition.DELIVERED})
    delivered = {(endpoint, rewritten) for _, endpoint, rewritten in ends if endpoint is not None}
    if delivered:
        target = _target({endpoint for endpoint, _ in delivered}, service)
        parts.insert(0, f"{target}, {_rewriting(delivered, packet)}")
    return " or ".join(parts)


def _target(endpoints: set[tuple[str, int]], service: ServicePlan | None) -> str:
    def held(pool: Pool | None) -> set[tuple[str, int]]:
        """Return the addresses and ports of a pool's endpoints."""
        return {(each.address, each.port) for each in pool.endpoints} if pool else set()

    if service is not None and endpoints == held(service.cluster):
        return "to an endpoint of the cluster"
    if service is not None and endpoints == held(service.local):
        return "to an endpoint on this node"
    return f"to {' or '.join(sorted(join_port(*each) for each in endpoints))}"


def _rewriting(delivered: set[tuple[tuple[str, int], bool]], packet: Packet) -> str:
    kinds = {rewritten for _, rewritten in delivered}
    if len(kinds) > 1:
        itself = all(rewritten is (endpoint[0] == packet.source) for endpoint, rewritten in delivered)
        return f"source rewritten {'when it meets itself' if itself else 'for some'}"
    return "source rewritten" if kinds == {True} else "source kept"


def _probabilities(ends: _Ends) -> str:
    """Return the probabilities, if the outcomes differ only in them (or in which endpoints see a rewritten source)."""
    shares = sorted((join_port(*to), rewritten, share) for (_, to, rewritten), share in ends.items() if to)
    return ", ".join(f"{to}{' rewritten' if rewritten else ''}: {share}" for to, rewritten, share in shares)


class ModeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A mode on one node."""

    mode: str
    config: NodeConfig
    """With the mode's defaults."""
    deviations: frozenset[Deviation]


def serving(snapshot: Snapshot, family: IPFamily, side: ModeSetup) -> ServingState:
    """Return how a mode serves one IP family."""
    return ServingState(plan=plan_once(snapshot, side.config, family), deviations=side.deviations)


def factors(snapshot: Snapshot, family: IPFamily, before: ModeSetup, after: ModeSetup) -> Iterator[Factor]:
    """Yield the factors that turn `before` into `after`, one by one."""
    first = so_far = serving(snapshot, family, before)
    config = before.config
    for field in NodeConfig.__struct_fields__:
        one, other = getattr(before.config, field), getattr(after.config, field)
        if one == other:
            continue
        config = msgspec.structs.replace(config, **{field: other})
        alone = msgspec.structs.replace(before.config, **{field: other})
        so_far = msgspec.structs.replace(so_far, plan=plan_once(snapshot, config, family))
        yield Factor(
            reason=f"{_camel(field)} is {_value(one)} in {before.mode} mode, {_value(other)} in {after.mode} mode",
            alone=msgspec.structs.replace(first, plan=plan_once(snapshot, alone, family)),
            so_far=so_far,
        )
    for side, own in ((before, before.deviations - after.deviations), (after, after.deviations - before.deviations)):
        for deviation in sorted(own, key=lambda each: each.value):
            so_far = msgspec.structs.replace(so_far, deviations=so_far.deviations ^ {deviation})
            yield Factor(
                reason=f"in {side.mode} mode {deviation.words}",
                alone=msgspec.structs.replace(first, deviations=first.deviations ^ {deviation}),
                so_far=so_far,
            )


def _camel(field: str) -> str:
    """Return the setting's name in the configuration file."""
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _value(value: object) -> str:
    if value is None:
        return "every address"
    if isinstance(value, bool):
        return "on" if value else "off"
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "empty"
