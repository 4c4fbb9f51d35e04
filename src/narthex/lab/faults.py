"""Fault injection as data: faults, and the nftables rules and delays that cause them.

A node's faults are rules of the bridge family on the fabric, where each node is a port, so ARP and neighbour discovery are
affected as well. A pod's faults are rules in its own namespace. Each fault has a table of its own, which is replaced as a
whole. The rules are text, since walks over rule sets do not follow bridge rules.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

import msgspec

TABLE = "narthex-faults"
_LOOPBACK = '"lo"'


class FaultKind(enum.Enum):
    """Kinds of faults."""

    LOSS = "loss"
    """Packets are lost at random, in both directions."""
    PARTITION = "partition"
    """Nodes reach only each other; pods reach nothing."""
    DELAY = "delay"
    """Packets are delayed. Requires netem in the kernel."""
    API = "api"
    """The API server closes its listeners and connections."""


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """An active fault."""

    number: int
    """Identifies the fault in commands."""
    kind: FaultKind
    targets: tuple[str, ...] = ()
    """Nodes (`node-1`) and pods (`namespace/name`); empty for the API server."""
    percent: int = 0
    """Share of lost packets."""
    milliseconds: int = 0
    """Delay in each direction."""
    since: float = 0.0
    until: float | None = None
    """Seconds since 1970, as `since`; None: until it is ended."""

    def text(self, now: float) -> str:
        """Describe the fault: `loss of 30 % at node-1, 12 s more`."""
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
    """Where the packets of a node or pod are filtered."""

    namespace: str
    """Network namespace of the rules: the fabric's for a node, its own for a pod."""
    device: str
    """A node's bridge port, or a pod's interface."""
    node: bool


class InvalidFault(ValueError):
    """A fault that is impossible; the message says why."""


def validate_fault(fault: InjectedFault, places: Mapping[str, FaultTarget]) -> InjectedFault:
    """Return the fault unless it is impossible. Raises InvalidFault."""
    if fault.kind is FaultKind.API:
        return fault
    if not fault.targets:
        raise InvalidFault("name a node or a pod")
    for target in fault.targets:
        if target not in places:
            raise InvalidFault(f"there is no node or pod {target!r}; there are: {', '.join(sorted(places)) or 'none'}")
    if fault.kind is FaultKind.LOSS and not 1 <= fault.percent <= 100:
        raise InvalidFault(f"{fault.percent} % is not a valid loss: use 1 to 100")
    if fault.kind is FaultKind.DELAY and not 1 <= fault.milliseconds <= 60_000:
        raise InvalidFault(f"{fault.milliseconds} ms is not a valid delay: use 1 to 60000")
    return fault


def active_faults(
    faults: Iterable[InjectedFault], places: Mapping[str, FaultTarget], now: float
) -> tuple[InjectedFault, ...]:
    """Return the faults that have not expired, without targets that no longer exist."""
    left = []
    for fault in faults:
        targets = tuple(target for target in fault.targets if target in places)
        if (fault.until is None or now < fault.until) and (targets or fault.kind is FaultKind.API):
            left.append(msgspec.structs.replace(fault, targets=targets) if targets != fault.targets else fault)
    return tuple(left)


def next_end(faults: Iterable[InjectedFault]) -> float | None:
    """Return the time at which the next fault expires (seconds since 1970), None if none does."""
    return min((fault.until for fault in faults if fault.until is not None), default=None)


def rules(faults: Sequence[InjectedFault], places: Mapping[str, FaultTarget]) -> dict[str, str]:
    """Return the complete nft rules for the faults, by network namespace."""
    found: dict[str, tuple[bool, dict[str, list[str]]]] = {}

    def put(place: FaultTarget, chain: str, line: str) -> None:
        """Add a line to a chain of the target's network namespace."""
        found.setdefault(place.namespace, (place.node, {}))[1].setdefault(chain, []).append(line)

    for fault in faults:
        # The kernel refuses a comparison with 100, which would always hold.
        some = f"numgen random mod 100 < {fault.percent} " if fault.percent < 100 else ""
        verdict = {FaultKind.LOSS: f"{some}counter drop", FaultKind.PARTITION: "counter drop"}.get(fault.kind)
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
    """Return the nft commands that delete the table if it exists."""
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
    """Return the delay in milliseconds by namespace and device: towards a node, and from a pod."""
    found: dict[tuple[str, str], int] = {}
    for fault in faults:
        if fault.kind is FaultKind.DELAY:
            for target in fault.targets:
                place = places[target]
                key = place.namespace, place.device
                found[key] = found.get(key, 0) + fault.milliseconds
    return found
