"""Explanations of why a Service's addresses are announced or not: for users, as data, and as the Service's condition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from narthex.lb.announce import AddressElection, AnnouncementReason
from narthex.lb.service_status import ServiceCondition

CONDITION = "narthex/Announced"
FOREIGN = "AlsoAnsweredByOthers"
"""Reason of the condition if hosts that are not announcers answer for the address, too."""
_MOST_TEXT = 1500


class AnnouncerObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's announcer reports about an address."""

    answers: bool = False
    yielding: bool = False
    links: tuple[str, ...] = ()
    last_request: str = ""
    """Description of the last request; empty if there was none."""
    gratuitous: int = 0
    requests: int = 0
    foreign: tuple[str, ...] = ()
    """Descriptions of other hosts that answered."""


class NodeExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """One node's role for an address."""

    node: str
    announces: bool
    reason: str
    text: str
    seen: AnnouncerObservation | None = None
    """None if its announcer was not queried or did not respond."""


class AddressExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explanation of one address."""

    address: str
    pool: str
    holder: str
    """The elected node; empty if there is none."""
    nodes: tuple[NodeExplanation, ...]
    notes: tuple[str, ...] = ()


class ServiceExplanation(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lb-why"):
    """Explanation of all addresses of a Service, as `narthex lb why -o json` prints it."""

    version: Literal[1] = 1

    service: str
    addresses: tuple[AddressExplanation, ...]
    notes: tuple[str, ...] = ()
    """Notes that apply to all addresses."""


def condition(
    decisions: Sequence[AddressElection], holders: Mapping[str, Sequence[str]], foreign: Mapping[str, Sequence[str]]
) -> ServiceCondition:
    """Return the condition of a Service with these elections.

    `holders` are the nodes that answer for each address, `foreign` the MAC addresses of other hosts that do.
    """
    missing = [each for each in decisions if not holders.get(each.address)]
    notes = list(dict.fromkeys(note for each in decisions for note in each.notes))
    others = [f"{address} is also answered for by {', '.join(macs)}" for address, macs in foreign.items() if macs]
    if not missing:
        said = [f"{each.address} by {' and '.join(holders[each.address])}" for each in decisions]
        reason = FOREIGN if others else AnnouncementReason.ANNOUNCES.value
        return _condition(True, reason, [", ".join(said), *others, *notes])
    reasons = {verdict.reason for verdict in missing[0].verdicts}
    reason = reasons.pop().value if len(reasons) == 1 else "NobodyAnnounces"  # codespell:ignore nobody
    said = [f"no node answers for {each.address}: {_together(each)}" for each in missing]
    return _condition(False, reason, [*said, *others, *notes])


def _condition(holds: bool, reason: str, said: Iterable[str]) -> ServiceCondition:
    text = "; ".join(said)
    return ServiceCondition(
        type=CONDITION,
        holds=holds,
        reason=reason,
        message=text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "...",
    )


def _together(decision: AddressElection) -> str:
    """Explain why no node answers; a common reason appears once."""
    texts = list(dict.fromkeys(verdict.text for verdict in decision.verdicts))
    return "; ".join(texts) or "there is no node"


def explain(
    service: str, decisions: Iterable[AddressElection], seen: Mapping[str, Mapping[str, AnnouncerObservation]]
) -> ServiceExplanation:
    """Return the explanation of a Service. `seen` are the announcers' own observations, by node and address."""
    return ServiceExplanation(
        service=service,
        addresses=tuple(
            AddressExplanation(
                address=decision.address,
                pool=decision.pool,
                holder=decision.holder,
                nodes=tuple(
                    NodeExplanation(
                        node=verdict.node,
                        announces=verdict.reason is AnnouncementReason.ANNOUNCES,
                        reason=verdict.reason.value,
                        text=verdict.text,
                        seen=seen.get(verdict.node, {}).get(decision.address),
                    )
                    for verdict in decision.verdicts
                ),
                notes=decision.notes,
            )
            for decision in decisions
        ),
    )


def lines(explanation: ServiceExplanation) -> list[str]:
    """Render the explanation as text lines."""
    found = [explanation.service, *(f"  note: {note}" for note in explanation.notes)]
    for each in explanation.addresses:
        turn = f"the elected node is {each.holder}" if each.holder else "no node is elected"
        found.append(f"  {each.address}{f' (pool {each.pool})' if each.pool else ''}: {turn}")
        found += [f"    note: {note}" for note in each.notes]
        for node in each.nodes:
            found.append(f"    {node.node}: {node.reason}: {node.text}")
            found += [f"      {line}" for line in _seen(node.seen)]
    return found


def _seen(seen: AnnouncerObservation | None) -> list[str]:
    if seen is None:
        return []
    does = "answers" + (" until another takes over" if seen.yielding else "")
    where = f" on {', '.join(seen.links)}" if seen.links else ""
    answer = f"its announcer {does}{where}" if seen.answers else "its announcer does not answer"
    requests = f"; {seen.requests} requests, the last {seen.last_request}" if seen.last_request else ""
    announced = f"; announced {seen.gratuitous} times" if seen.gratuitous else ""
    return [answer + requests + announced, *(f"also answered by {each}" for each in seen.foreign)]


def read_state(state: Mapping[str, Any]) -> dict[str, AnnouncerObservation]:
    """Return the observations in a running announcer's status, by address; empty if the status is invalid."""
    try:
        status = msgspec.convert(state, _State)
    except msgspec.ValidationError:
        return {}
    return {
        each.address: AnnouncerObservation(
            answers=each.answers,
            yielding=each.yielding,
            links=tuple(each.links),
            last_request=each.last_request.text if each.last_request else "",
            gratuitous=each.gratuitous,
            requests=each.requests,
            foreign=tuple(other.text for other in each.foreign),
        )
        for each in status.addresses
    }


class _LastRequest(msgspec.Struct, rename="camel"):
    sender: str
    mac: str
    link: str
    seconds_ago: float

    @property
    def text(self) -> str:
        """Description of the request."""
        return f"by {self.sender or self.mac} on {self.link} {self.seconds_ago:.0f} s ago"


class _ForeignResponder(msgspec.Struct, rename="camel"):
    mac: str
    node: str
    link: str
    last_seconds_ago: float

    @property
    def text(self) -> str:
        """Description of the host."""
        return (
            f"{self.mac}{f' (node {self.node})' if self.node else ''} on {self.link} {self.last_seconds_ago:.0f} s ago"
        )


class _Address(msgspec.Struct, rename="camel"):
    address: str
    answers: bool
    yielding: bool
    links: list[str]
    requests: int
    gratuitous: int
    last_request: _LastRequest | None
    foreign: list[_ForeignResponder]


class _State(msgspec.Struct):
    addresses: list[_Address]
