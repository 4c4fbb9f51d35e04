"""Classes of packets, grouped until each group is one line: by frontend and senders, then by Service, then over Services."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from narthex.netfilter.sets.space import DADDR, LINK, SADDR, SPORT, Box, PacketSpace
from narthex.netfilter.sets.values import ValueSet
from narthex.proxy.plan.ir import FrontendKind
from narthex.trace.proof.describe import addresses_text
from narthex.trace.proof.named_frontends import FrontendName, NamedFrontends
from narthex.trace.proof.outcomes import ClassOutcome
from narthex.trace.proof.packet_source import packets_in
from narthex.trace.proof.sender_sets import SenderSets, joined

Effect = tuple[ClassOutcome, ...]
"""One outcome, or the outcomes before and after a change."""
_FEW = 3
"""Frontends and Services that are named."""
ITSELF = "endpoints to themselves"


class ClassLine(NamedTuple):
    """Classes that have one description."""

    senders: str
    services: tuple[str, ...]
    """The Service ports; empty for packets without a frontend, and for frontends without a name."""
    frontends: tuple[FrontendName, ...]
    place: str
    """What packets without a frontend are sent to."""
    text: str
    """What happens to them."""
    effect: Effect
    """That of the first class."""
    hairpin: tuple[str, ...]
    """Endpoints whose own packets, sent to the Service and from there back to them, are masqueraded, unlike those of others."""
    boxes: tuple[Box, ...]

    @property
    def size(self) -> int:
        """The number of packets."""
        return sum(map(packets_in, self.boxes))

    @property
    def destination(self) -> str:
        """`shop/web:http's cluster IP 10.96.0.5:80/TCP` and the like."""
        if not self.frontends:
            return self.place
        where = f" {self.place}" if self.place else ""
        if len(self.services) > 1:
            kinds = joined([f"{kind}s" for kind in dict.fromkeys(each.kind for each in self.frontends)])
            more = [f"{len(self.services) - _FEW:,} more Service ports"] if len(self.services) > _FEW else []
            return f"{kinds} of {joined([*self.services[:_FEW], *more])}{where}"
        texts = [f"{each.kind} {each.at}" for each in self.frontends[:_FEW]]
        if len(self.frontends) > _FEW:
            texts.append(f"{len(self.frontends) - _FEW} more")
        owner = f"{self.services[0]}'s " if self.services else ""
        return f"{owner}{joined(texts)}{where}"

    @property
    def described(self) -> str:
        """The whole line."""
        return f"{way_text(self.senders, self.destination)}: {self.text}"


def way_text(senders: str, destination: str) -> str:
    """Return `pods to shop/web:http's cluster IP 10.96.0.5:80/TCP`."""
    return f"{senders} {'by way of' if senders == ITSELF else 'to'} {destination}"


class _Key(NamedTuple):
    """What the classes of a group have in common."""

    name: FrontendName | None
    where: str
    """What else distinguishes destinations."""
    effect: Effect
    itself: bool = False
    """The senders are endpoints that meet themselves."""


class ClassGroups:
    """Groups classes of packets by what happens to them."""

    def __init__(
        self,
        space: PacketSpace,
        senders: SenderSets,
        frontends: NamedFrontends,
        text_of: Callable[[Effect], str],
        own_text: Callable[[Effect], str] | None = None,
    ) -> None:
        """Start without classes.

        Args:
            space: The space of the packets.
            senders: The names of senders.
            frontends: The names of destinations.
            text_of: Returns an effect in words; groups with equal words are merged.
            own_text: Returns in words what happens to packets of an endpoint to itself, if that alone differs from what
                happens to others. Default: they are described as others are.
        """
        self._space, self._senders, self._frontends = space, senders, frontends
        self._text_of, self._own_text = text_of, own_text
        self._groups: dict[_Key, list[Box]] = {}
        self._own: list[tuple[_Key, str, Box]] = []
        self._hairpins: dict[_Key, set[str]] = {}
        self._first: dict[_Key, Effect] = {}
        self._endpoints: dict[Effect, dict[int, str]] = {}

    def add_alike(self, box: Box, effect: Effect, shown: Effect, *, itself: bool = False) -> None:
        """Add a class to those that are shown with one effect. `itself`: its senders are endpoints that meet themselves."""
        for name, piece in self._frontends.split(box):
            key = _Key(name, self._where(name, piece), shown, itself)
            self._first.setdefault(key, effect)
            self._groups.setdefault(key, []).append(piece)

    def add(self, box: Box, effect: Effect) -> None:
        """Add a class: all packets of a box. Classes are disjoint."""
        sources = box[SADDR]
        for number, address in self._hidden(effect, sources):
            one = ValueSet(((number, number),))
            self._add((*box[:SADDR], one), effect, address)
            sources = sources - one
        if sources:
            own = self._addresses(effect).get(sources.first, "") if sources.size == 1 else ""
            self._add((*box[:SADDR], sources), effect, own)

    def _add(self, box: Box, effect: Effect, own: str) -> None:
        for name, piece in self._frontends.split(box):
            key = _Key(name, self._where(name, piece), effect)
            if own:
                self._own.append((key, own, piece))
            else:
                self._groups.setdefault(key, []).append(piece)

    def _hidden(self, effect: Effect, sources: ValueSet) -> list[tuple[int, str]]:
        """Return endpoints among many senders that may be masqueraded for another reason than the others: they meet themselves."""
        if sources.size == 1:
            return []
        return [
            (number, address)
            for number, address in self._addresses(effect).items()
            if number in sources and any(True in outcome.own(address) for outcome in effect)
        ]

    def _where(self, name: FrontendName | None, piece: Box) -> str:
        """Return the words that distinguish destinations without a frontend, and node ports on some of the node's addresses."""
        if name is None:
            return self._frontends.place(piece)
        if name.kind != FrontendKind.NODE_PORT.value or not self._space.node - piece[DADDR]:
            return ""
        if not piece[DADDR] - self._space.loopback:
            return "on loopback"
        return f"on {addresses_text(self._space, piece[DADDR])}"

    def _addresses(self, effect: Effect) -> dict[int, str]:
        known = self._endpoints.get(effect)
        if known is None:
            texts = {each.endpoint[0] for outcome in effect for each in outcome.shares if each.endpoint[0]}
            known = self._endpoints[effect] = {self._space.address(text): text for text in texts}
        return known

    def lines(self) -> list[ClassLine]:
        """Return a line for each Service, its senders, and what happens to their packets; `across_services` merges them further."""
        self._place_own()
        merged: dict[tuple[str, str, str, str], list[tuple[_Key, list[Box]]]] = {}
        for key, boxes in self._groups.items():
            parts = [(box[SPORT], box[LINK], box[SADDR]) for box in boxes]
            senders = ITSELF if key.itself else self._senders.words(parts)
            text = self._own_text(key.effect) if key.itself and self._own_text else self._text_of(key.effect)
            service = key.name.service or key.name.at if key.name is not None else ""
            merged.setdefault((senders, service, key.where, text), []).append((key, boxes))
        return [self._line(senders, text, held) for (senders, _, _, text), held in merged.items()]

    def _line(self, senders: str, text: str, found: list[tuple[_Key, list[Box]]]) -> ClassLine:
        first = found[0][0]
        fronts = sorted({key.name for key, _ in found if key.name is not None})
        hairpins = {address for key, _ in found for address in self._hairpins.get(key, ())}
        return ClassLine(
            senders=senders,
            services=tuple(sorted({each.service for each in fronts if each.service})),
            frontends=tuple(fronts),
            place=first.where,
            text=text,
            effect=self._first.get(first, first.effect),
            hairpin=tuple(sorted(hairpins)),
            boxes=tuple(box for _, boxes in found for box in boxes),
        )

    # ---- packets of an endpoint to itself ------------------------------------------------------------------------------------

    def _place_own(self) -> None:
        """Add the packets of endpoints to Services of theirs to the groups of other senders where only masquerading differs."""
        pending, self._own = self._own, []
        for key, address, box in pending:
            like = [other for other in self._like(key, address) if other in self._groups]
            near = (other for other in like if _touches(self._groups[other], box))
            fitting = next(near, like[0] if like else None)
            if fitting is None and self._own_text is not None and _only_own(key.effect, address):
                own = tuple(
                    ClassOutcome(tuple(each for each in outcome.shares if each.endpoint[0] == address))
                    for outcome in key.effect
                )
                fitting = key._replace(effect=own, itself=True)
                self._groups.setdefault(fitting, []).append(box)
                continue
            if fitting is not None and fitting != key:
                self._hairpins.setdefault(fitting, set()).add(address)
            self._groups.setdefault(fitting or key, []).append(box)

    @staticmethod
    def _like(key: _Key, address: str) -> Iterator[_Key]:
        """Yield the key, and the key of other senders if this sender is masqueraded only because it is the endpoint itself."""
        yield key
        flags = [outcome.own(address) for outcome in key.effect]
        if {True} in [set(each) for each in flags] and not any(False in each for each in flags):
            yield key._replace(effect=tuple(outcome.with_own(address, False) for outcome in key.effect))


def across_services(lines: Iterable[ClassLine]) -> list[ClassLine]:
    """Merge the lines of Services that have equal senders, kinds of frontends, and words. Those of Services and large ones come first."""
    found: dict[tuple[object, ...], list[ClassLine]] = {}
    for line in lines:
        kinds = tuple(sorted({each.kind for each in line.frontends}))
        found.setdefault((line.senders, kinds, line.place, line.text), []).append(line)
    merged = [held[0] if len(held) == 1 else _one_line(held) for held in found.values()]
    return sorted(merged, key=lambda line: (not line.frontends, -line.size, line.senders, line.services, line.text))


def _one_line(lines: Sequence[ClassLine]) -> ClassLine:
    return lines[0]._replace(
        services=tuple(sorted({name for line in lines for name in line.services})),
        frontends=tuple(sorted({each for line in lines for each in line.frontends})),
        hairpin=tuple(sorted({address for line in lines for address in line.hairpin})),
        boxes=tuple(box for line in lines for box in line.boxes),
    )


_LOOKED_AT = 8
"""Boxes of a group that are compared with a sender: those of ordinary senders come first."""


def _touches(boxes: Sequence[Box], own: Box) -> bool:
    """Return True if a group has an address next to that of a single sender, so that both are most likely of one network."""
    address = own[SADDR].first
    return any(address - 1 in box[SADDR] or address + 1 in box[SADDR] for box in boxes[:_LOOKED_AT])


def _only_own(effect: Effect, address: str) -> bool:
    """Return True if outcomes differ only in whether what goes to one address is masqueraded."""
    return len({outcome.with_own(address, False) for outcome in effect}) == 1 and len(set(effect)) > 1
