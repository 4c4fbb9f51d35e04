"""What the kernel itself says of a packet's way: the text of `nft monitor trace`, `xtables-monitor --trace`, and the log
lines of the TRACE target of iptables-legacy.

nft's form is that of nft 1.0 and 1.1 (src/netlink.c, netlink_events_trace_cb), with or without `-a` and `-n`. It also
covers iptables with the nf_tables backend, whose TRACE sets the same mark. Lines of anything else are passed over, for a
monitor prints what it likes beside them.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator

import msgspec


class TraceEvent(enum.Enum):
    """What kind of thing the kernel tells."""

    RULE = "rule"
    """A rule matched."""
    POLICY = "policy"
    """A base chain's end was reached."""
    RETURN = "return"
    """A chain that was jumped to was left at its end."""


class KernelStep(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened to the packet, in the kernel's words."""

    family: str
    """`ip`, `ip6` or `inet`: of the table."""
    table: str
    chain: str
    event: TraceEvent
    verdict: str = ""
    """`accept`, `drop`, `continue`, `return`, `jump NAME`, `goto NAME`, …; empty where the kernel does not say it."""
    rule: str = ""
    handle: int = 0
    """Of the rule in nf_tables; its number in the chain for iptables-legacy; 0: not told."""
    mark: int = 0
    """The packet's mark afterwards."""


class TracedPacket(msgspec.Struct, frozen=True, kw_only=True):
    """The packet as it came into a base chain."""

    iif: str = ""
    oif: str = ""
    source: str = ""
    destination: str = ""
    source_port: int = 0
    port: int = 0


class ChainVisit(msgspec.Struct, frozen=True, kw_only=True):
    """A base chain that the packet met, and all that happened there."""

    packet: TracedPacket
    steps: tuple[KernelStep, ...] = ()


class KernelTrace(msgspec.Struct, frozen=True, kw_only=True):
    """All that the kernel told of one packet in one network namespace."""

    number: str
    """The kernel's name for the packet: eight hexadecimal digits; the flow for iptables-legacy, which has none."""
    visits: tuple[ChainVisit, ...] = ()
    probe_chain: str = ""
    """The chain of a probe's table where it was marked; see `probe_traces`."""

    @property
    def steps(self) -> tuple[KernelStep, ...]:
        """The steps of all base chains."""
        return tuple(step for visit in self.visits for step in visit.steps)


_NFT = re.compile(r"trace id ([0-9a-f]+) (ip6?|inet|arp|bridge|netdev) (\S+) (\S+) (.*)", re.ASCII)
_VERDICT = re.compile(r"verdict ((?:jump|goto) \S+|[a-z]+)\)?", re.ASCII)
_MARK = re.compile(r"\bmeta mark (0x[0-9a-f]+)", re.ASCII)
_HANDLE = re.compile(r" # handle (\d+)$", re.ASCII)
_PACKET = re.compile(
    r'\b(iif|oif|saddr|daddr|sport|dport) (?:"([^"]*)"|(\S+))',
    re.ASCII,
)
_LEGACY = re.compile(r"TRACE: ([^\s:]+):([^\s:]+):(rule|policy|return):(\d+) (.*)", re.ASCII)
_WORDS = re.compile(r"\b([A-Z0-9]+)=(\S*)", re.ASCII)
_XTABLES_PACKET = re.compile(r"PACKET: (\d+) ([0-9a-f]+) (.*)", re.ASCII)
_XTABLES = re.compile(
    r" ?TRACE: (\d+) ([0-9a-f]+) ([^\s:]+):([^\s:]+):(rule|policy|return):(?:0x([0-9a-f]+):)?([A-Z]+)(?::(\S+))?(.*)",
    re.ASCII,
)
_XTABLES_FAMILIES = {"1": "inet", "2": "ip", "10": "ip6"}


class _Gathering:
    """Traces while their lines come in. Lines of packets may be mixed."""

    def __init__(self) -> None:
        self._visits: dict[str, list[tuple[TracedPacket, list[KernelStep]]]] = {}

    def packet(self, number: str, packet: TracedPacket) -> None:
        self._visits.setdefault(number, []).append((packet, []))

    def step(self, number: str, step: KernelStep) -> None:
        visits = self._visits.setdefault(number, [])
        if not visits:
            visits.append((TracedPacket(), []))
        visits[-1][1].append(step)

    def traces(self) -> tuple[KernelTrace, ...]:
        return tuple(
            KernelTrace(
                number=number, visits=tuple(ChainVisit(packet=seen, steps=tuple(steps)) for seen, steps in visits)
            )
            for number, visits in self._visits.items()
        )


def parse(lines: Iterable[str]) -> tuple[KernelTrace, ...]:
    """The packets that lines of any of the three forms tell of, in the order in which they were first seen."""
    found = _Gathering()
    for line in lines:
        line = line.rstrip()
        if line.startswith("trace id "):
            _nft(line, found)
        elif "TRACE: " in line or line.startswith("PACKET: "):
            _xtables(line, found)
    return found.traces()


def _nft(line: str, found: _Gathering) -> None:
    match = _NFT.match(line)
    if match is None:
        return
    number, family, table, chain, rest = match.groups()
    if rest.startswith("packet: "):
        found.packet(number, _seen_nft(rest))
    elif rest.startswith("rule "):
        # The rule's own text may hold the same words, in a comment.
        text, _, last = rest[len("rule ") :].rpartition(" (verdict ")
        told = last.partition(")")[0]
        handle = _HANDLE.search(text)
        found.step(
            number,
            KernelStep(
                family=family,
                table=table,
                chain=chain,
                event=TraceEvent.RULE,
                verdict=told,
                rule=" ".join((text[: handle.start()] if handle else text).split()),
                handle=int(handle[1]) if handle else 0,
            ),
        )
    elif rest.startswith(("policy ", "verdict ")):
        kind, _, said = rest.partition(" ")
        verdict = _VERDICT.match(f"verdict {said}")
        mark = _MARK.search(said)
        found.step(
            number,
            KernelStep(
                family=family,
                table=table,
                chain=chain,
                event=TraceEvent.POLICY if kind == "policy" else TraceEvent.RETURN,
                verdict=verdict[1] if verdict else "",
                mark=int(mark[1], 16) if mark else 0,
            ),
        )


def _seen_nft(text: str) -> TracedPacket:
    # The link's own addresses come before those of the network.
    held = {name: quoted or plain for name, quoted, plain in _PACKET.findall(text)}
    return TracedPacket(
        iif=held.get("iif", ""),
        oif=held.get("oif", ""),
        source=held.get("saddr", ""),
        destination=held.get("daddr", ""),
        source_port=_number(held.get("sport", "")),
        port=_number(held.get("dport", "")),
    )


def _xtables(line: str, found: _Gathering) -> None:
    packet = _XTABLES_PACKET.match(line)
    if packet is not None:
        found.packet(packet[2], _seen_log(packet[3]))
        return
    match = _XTABLES.match(line)
    if match is not None:
        family, number, table, chain, told, handle, verdict, target, rest = match.groups()
        found.step(
            number,
            KernelStep(
                family=_XTABLES_FAMILIES.get(family, family),
                table=table,
                chain=chain,
                event=TraceEvent(told),
                verdict=f"{verdict.lower()} {target}" if target else verdict.lower(),
                rule=rest.strip(),
                handle=int(handle, 16) if handle else 0,
            ),
        )
        return
    _legacy(line, found)


def _legacy(line: str, found: _Gathering) -> None:
    """A line of the kernel's log: `TRACE: nat:PREROUTING:rule:2 IN=eth0 OUT= SRC=… DST=…`. It has no verdict and no
    number for the packet, so its flow and its IP identification stand for one."""
    match = _LEGACY.search(line)
    if match is None:
        return
    table, chain, told, number, rest = match.groups()
    seen = _seen_log(rest)
    words = dict(_WORDS.findall(rest))
    packet = f"{seen.source}#{words.get('ID', words.get('FLOWLBL', ''))}"
    found.packet(packet, seen)
    mark = words.get("MARK", "0")
    found.step(
        packet,
        KernelStep(
            family="ip6" if ":" in seen.source else "ip",
            table=table,
            chain=chain,
            event=TraceEvent(told),
            handle=int(number),
            mark=int(mark, 16) if mark.startswith("0x") else 0,
        ),
    )


def _seen_log(text: str) -> TracedPacket:
    # What an ICMP error quotes of another packet stands in brackets behind.
    words = dict(_WORDS.findall(text.partition(" [")[0]))
    return TracedPacket(
        iif=words.get("IN", ""),
        oif=words.get("OUT", ""),
        source=words.get("SRC", ""),
        destination=words.get("DST", ""),
        source_port=_number(words.get("SPORT", words.get("SPT", ""))),
        port=_number(words.get("DPORT", words.get("DPT", ""))),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else 0


def probe_traces(traces: Iterable[KernelTrace], table: str) -> Iterator[KernelTrace]:
    """The traces that probe_chain in a table of this name, without what happened there: a probe's own rules are no part of
    the answer."""
    for trace in traces:
        if trace.visits and trace.visits[0].steps and trace.visits[0].steps[0].table == table:
            others = tuple(visit for visit in trace.visits if not visit.steps or visit.steps[0].table != table)
            yield KernelTrace(number=trace.number, visits=others, probe_chain=trace.visits[0].steps[0].chain)
