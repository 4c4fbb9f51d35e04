"""Explanations of why a Service's addresses are announced or not: for users, as data, and as the Service's condition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from narthex.lb.election import AddressElection, AnnouncementReason
from narthex.lb.heartbeat import PeerState
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
        said = [", ".join(f"{each.address} by {' and '.join(holders[each.address])}" for each in decisions)]
        reason = FOREIGN if others else AnnouncementReason.ANNOUNCES.value
    else:
        reasons = {verdict.reason for verdict in missing[0].verdicts}
        reason = reasons.pop().value if len(reasons) == 1 else "NoNodeAnnounces"
        said = []
        for each in missing:
            # A common reason appears once.
            texts = dict.fromkeys(verdict.text for verdict in each.verdicts) or ["there is no node"]
            said.append(f"no node answers for {each.address}: {'; '.join(texts)}")
    message = "; ".join([*said, *others, *notes])
    if len(message) > _MOST_TEXT:
        message = message[: _MOST_TEXT - 3] + "..."
    return ServiceCondition(type=CONDITION, holds=not missing, reason=reason, message=message)


def explain(
    service: str, decisions: Iterable[AddressElection], states: Mapping[str, AnnouncerStatus]
) -> ServiceExplanation:
    """Return the explanation of a Service. `states` are the announcers' own statuses, by node."""
    seen = {(node, each.address): each.observation for node, state in states.items() for each in state.addresses}
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
                        seen=seen.get((verdict.node, decision.address)),
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
    does = "answers for it" + (" until another takes over" if seen.yielding else "")
    where = f" on {', '.join(seen.links)}" if seen.links else ""
    answer = (
        f"its announcer {does}{where}" if seen.answers else "its announcer is reachable, and does not answer for it"
    )
    requests = f"; {seen.requests} requests, the last {seen.last_request}" if seen.last_request else ""
    announced = f"; announced {seen.gratuitous} times" if seen.gratuitous else ""
    return [answer + requests + announced, *(f"also answered by {each}" for each in seen.foreign)]


class AnnouncerLink(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A link in an announcer's status."""

    name: str
    mac: str = ""
    link_local: str = ""


class AnnouncerPeer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A peer in an announcer's status."""

    node: str
    address: str = ""
    state: PeerState
    heard_seconds_ago: float | None = None
    leaving: bool
    standing_back: bool
    links: tuple[str, ...]


class AnnouncerRequest(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The last request for an address in an announcer's status."""

    sender: str
    mac: str
    link: str
    seconds_ago: float

    def __str__(self) -> str:
        return f"by {self.sender or self.mac} on {self.link} {self.seconds_ago:.0f} s ago"


class AnnouncerRival(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Another host that answered for an address, in an announcer's status."""

    mac: str
    node: str
    link: str
    times: int = 0
    last_seconds_ago: float

    def __str__(self) -> str:
        node = f" (node {self.node})" if self.node else ""
        return f"{self.mac}{node} on {self.link} {self.last_seconds_ago:.0f} s ago"


class AnnouncerAddress(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An address in an announcer's status."""

    address: str
    services: tuple[str, ...] = ()
    pool: str = ""
    turn: str = ""
    """The elected node; empty if none can answer."""
    holders: tuple[str, ...] = ()
    answers: bool
    yielding: bool
    held_seconds: float | None = None
    links: tuple[str, ...]
    requests: int
    responses: int = 0
    gratuitous: int
    announced_seconds_ago: float | None = None
    last_request: AnnouncerRequest | None
    duplicates: int = 0
    foreign: tuple[AnnouncerRival, ...]
    nodes: tuple[dict[str, str], ...] = ()
    """Node, reason, and text of each verdict of the election."""
    notes: tuple[str, ...] = ()

    @property
    def observation(self) -> AnnouncerObservation:
        """The part that explanations show."""
        return AnnouncerObservation(
            answers=self.answers,
            yielding=self.yielding,
            links=self.links,
            last_request=str(self.last_request or ""),
            gratuitous=self.gratuitous,
            requests=self.requests,
            foreign=tuple(map(str, self.foreign)),
        )


class AnnouncerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An announcer's status, as JSON at its status port (`docs/reference/announcer.md`)."""

    node: str
    running: bool = True
    listening: bool = False
    """True until it has learned enough for an election."""
    standing_back: bool
    leaving: bool
    links: tuple[AnnouncerLink, ...]
    peers: tuple[AnnouncerPeer, ...]
    addresses: tuple[AnnouncerAddress, ...]
    failovers: int = 0
    beats: dict[str, int] = {}  # codespell:ignore beats

    @property
    def by_address(self) -> dict[str, AnnouncerAddress]:
        """Return the entries of the addresses."""
        return {each.address: each for each in self.addresses}


_STATUS = msgspec.json.Decoder(AnnouncerStatus)


def read_status(data: bytes) -> AnnouncerStatus | None:
    """Decode the response of an announcer's status port; None if it is invalid or the announcer does not run."""
    try:
        return _STATUS.decode(data)
    except msgspec.DecodeError:
        return None
