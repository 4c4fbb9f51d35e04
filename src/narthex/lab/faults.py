"""Faults of a lab's network as data: what is lost, cut off or slow at present, and which rules make it so.

Nodes are ports of the fabric's bridge, so their faults are rules of nft's bridge family there: ARP and neighbour discovery are
lost as well, as on a bad cable. A pod's faults are rules in its own namespace. Both stand in a table of their own, which is
replaced as a whole and leaves with the last fault. They are text: rules of a bridge are no part of what a walk can follow.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

TABLE = "narthex-faults"
_LOOPBACK = '"lo"'


class FaultKind(enum.Enum):
    """What goes wrong."""

    LOSS = "loss"
    """Some of the packets get lost, each by chance, in both directions."""
    PARTITION = "partition"
    """Nodes reach only one another, pods nobody."""
    DELAY = "delay"
    """Packets come later. Only where the kernel has netem."""
    API = "api"
    """The API server takes no connections, and those that there are end."""


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault in force."""

    number: int
    """By which it can be ended."""
    kind: FaultKind
    targets: tuple[str, ...] = ()
    """Nodes (`node-1`) and pods (`namespace/name`); none for the API server."""
    percent: int = 0
    """Of packets lost."""
    milliseconds: int = 0
    """Of delay, in each direction."""
    since: float = 0.0
    until: float | None = None
    """Both in seconds since 1970; None: until somebody ends it."""

    def text(self, now: float) -> str:
        """For people: `loss of 30 % at node-1, 12 s more`."""
        what = {
            FaultKind.LOSS: f"loss of {self.percent} %",
            FaultKind.PARTITION: "partition",
            FaultKind.DELAY: f"delay of {self.milliseconds} ms",
            FaultKind.API: "the API server is down",
        }[self.kind]
        where = f" at {', '.join(self.targets)}" if self.targets else ""
        left = "" if self.until is None else f", {max(0.0, self.until - now):.0f} s more"
        return f"{what}{where}{left}"


class FaultTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where the packets of a node or pod pass."""

    namespace: str
    """The network namespace of its rules: the fabric's for a node, its own for a pod."""
    device: str
    """A node's port at the fabric, a pod's own interface."""
    node: bool


class InvalidFault(ValueError):
    """The fault cannot be; the message says why."""


def validate_fault(fault: InjectedFault, places: Mapping[str, FaultTarget]) -> InjectedFault:
    """The fault, if it can be. `places`: of all nodes and pods. Raises BadFault."""
    if fault.kind is FaultKind.API:
        return fault
    if not fault.targets:
        raise InvalidFault("name a node or a pod")
    for target in fault.targets:
        if target not in places:
            raise InvalidFault(f"there is no node or pod {target!r}; there are: {', '.join(sorted(places)) or 'none'}")
    if fault.kind is FaultKind.LOSS and not 1 <= fault.percent <= 100:
        raise InvalidFault(f"{fault.percent} % cannot be lost: say 1 to 100")
    if fault.kind is FaultKind.DELAY and not 1 <= fault.milliseconds <= 60_000:
        raise InvalidFault(f"{fault.milliseconds} ms is no delay: say 1 to 60000")
    return fault


def active_faults(
    faults: Iterable[InjectedFault], places: Mapping[str, FaultTarget], now: float
) -> tuple[InjectedFault, ...]:
    """Faults whose time has not come, without targets that are gone."""
    left = []
    for fault in faults:
        targets = tuple(target for target in fault.targets if target in places)
        if (fault.until is None or now < fault.until) and (targets or fault.kind is FaultKind.API):
            left.append(msgspec.structs.replace(fault, targets=targets) if targets != fault.targets else fault)
    return tuple(left)


def next_end(faults: Iterable[InjectedFault]) -> float | None:
    """When the next one ends by itself, in seconds since 1970; None: none does."""
    return min((fault.until for fault in faults if fault.until is not None), default=None)


def rules(faults: Sequence[InjectedFault], places: Mapping[str, FaultTarget]) -> dict[str, str]:
    """By network namespace: all rules that the faults need there, as `nft -f` takes them."""
    found: dict[str, tuple[bool, dict[str, list[str]]]] = {}

    def put(place: FaultTarget, chain: str, line: str) -> None:
        found.setdefault(place.namespace, (place.node, {}))[1].setdefault(chain, []).append(line)

    for fault in faults:
        verdict = {
            FaultKind.LOSS: f"numgen random mod 100 < {fault.percent} counter drop",
            FaultKind.PARTITION: "counter drop",
        }.get(fault.kind)
        if verdict is None:
            continue
        there = [places[target] for target in fault.targets]
        side = "{ " + ", ".join(f'"{place.device}"' for place in there if place.node) + " }"
        for place in there:
            mine = f'"{place.device}"' if place.node else ""
            if not place.node:
                put(place, "input", f"iifname != {_LOOPBACK} {verdict}")
                put(place, "output", f"oifname != {_LOOPBACK} {verdict}")
                continue
            put(place, "input", f"iifname {mine} {verdict}")
            put(place, "output", f"oifname {mine} {verdict}")
            apart = fault.kind is FaultKind.PARTITION
            put(place, "forward", f"iifname {mine} {f'oifname != {side} ' if apart else ''}{verdict}")
            put(place, "forward", f"{f'iifname != {side} ' if apart else ''}oifname {mine} {verdict}")
    return {namespace: _table(node, chains) for namespace, (node, chains) in found.items()}


def delete_table(node: bool) -> str:
    """What takes the table away, there or not."""
    name = f"{_family(node)} {TABLE}"
    return f"add table {name}\ndelete table {name}\n"


def _family(node: bool) -> str:
    return "bridge" if node else "inet"


def _table(node: bool, chains: Mapping[str, Sequence[str]]) -> str:
    lines = [f"table {_family(node)} {TABLE} {{"]
    for name, rules_of_chain in sorted(chains.items()):
        lines += [f"  chain {name} {{", f"    type filter hook {name} priority 0; policy accept;"]
        lines += [f"    {rule}" for rule in rules_of_chain]
        lines.append("  }")
    return delete_table(node) + "\n".join(lines) + "\n}\n"


def delays(faults: Iterable[InjectedFault], places: Mapping[str, FaultTarget]) -> dict[tuple[str, str], int]:
    """By namespace and device: how many milliseconds later packets leave there. A node's are delayed on their way to it, a
    pod's on their way out."""
    found: dict[tuple[str, str], int] = {}
    for fault in faults:
        if fault.kind is FaultKind.DELAY:
            for target in fault.targets:
                place = places[target]
                key = place.namespace, place.device
                found[key] = found.get(key, 0) + fault.milliseconds
    return found
