"""Parser for the kernel's own trace of packets.

The formats are the text of `nft monitor trace`, `xtables-monitor --trace`, and the TRACE log lines of iptables-legacy. The
nft format is that of nft 1.0 and 1.1 (src/netlink.c, netlink_events_trace_cb), with or without `-a` and `-n`. It also covers
iptables with the nf_tables backend, where the TRACE target sets the same flag. Other lines, which a monitor prints too, are
ignored.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator

import msgspec


class TraceEvent(enum.Enum):
    """The kinds of events in a kernel trace."""

    RULE = "rule"
    """A rule matched."""
    POLICY = "policy"
    """The end of a base chain was reached."""
    RETURN = "return"
    """The end of a called chain was reached."""


class KernelStep(msgspec.Struct, frozen=True, kw_only=True):
    """An event that the kernel reported for a packet."""

    family: str
    """Family of the table: `ip`, `ip6`, or `inet`."""
    table: str
    chain: str
    event: TraceEvent
    verdict: str = ""
    """`accept`, `drop`, `continue`, `return`, `jump NAME`, `goto NAME`, …; empty if the kernel does not report it."""
    rule: str = ""
    handle: int = 0
    """Handle of the rule in nf_tables, or its number in the chain for iptables-legacy; 0 if not reported."""
    mark: int = 0
    """The packet mark after the event."""


class TracedPacket(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of a packet at its arrival in a base chain."""

    iif: str = ""
    oif: str = ""
    source: str = ""
    destination: str = ""
    source_port: int = 0
    port: int = 0


class ChainVisit(msgspec.Struct, frozen=True, kw_only=True):
    """The events of a packet in one base chain."""

    packet: TracedPacket
    steps: tuple[KernelStep, ...] = ()


class KernelTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one packet in one network namespace."""

    number: str
    """The kernel's ID of the packet, eight hexadecimal digits. For iptables-legacy, which has none, the flow."""
    visits: tuple[ChainVisit, ...] = ()
    probe_chain: str = ""
    """The chain of the probe's table that started the trace (see `probe_traces`)."""

    @property
    def steps(self) -> tuple[KernelStep, ...]:
        """The steps of all base chains."""
        return tuple(step for visit in self.visits for step in visit.steps)


_NFT = re.compile(r"trace id ([0-9a-f]+) (ip6?|inet|arp|bridge|netdev) (\S+) (\S+) (.*)", re.ASCII)
_VERDICT = re.compile(r"verdict ((?:jump|goto) \S+|[a-z]+)\)?", re.ASCII)
_MARK = re.compile(r"\bmeta mark (0x[0-9a-f]+)", re.ASCII)
_HANDLE = re.compile(r" # handle (\d+)$", re.ASCII)
_PACKET = re.compile(r'\b(iif|oif|saddr|daddr|sport|dport) (?:"([^"]*)"|(\S+))', re.ASCII)
_LEGACY = re.compile(r"TRACE: ([^\s:]+):([^\s:]+):(rule|policy|return):(\d+) (.*)", re.ASCII)
_WORDS = re.compile(r"\b([A-Z0-9]+)=(\S*)", re.ASCII)
_XTABLES_PACKET = re.compile(r"PACKET: (\d+) ([0-9a-f]+) (.*)", re.ASCII)
_XTABLES = re.compile(
    r" ?TRACE: (\d+) ([0-9a-f]+) ([^\s:]+):([^\s:]+):(rule|policy|return):(?:0x([0-9a-f]+):)?([A-Z]+)(?::(\S+))?(.*)",
    re.ASCII,
)
_XTABLES_FAMILIES = {"1": "inet", "2": "ip", "10": "ip6"}


class _TraceCollector:
    """Collects traces line by line. The lines of different packets may be interleaved."""

    def __init__(self) -> None:
        self._visits: dict[str, list[tuple[TracedPacket, list[KernelStep]]]] = {}

    def packet(self, number: str, packet: TracedPacket) -> None:
        """Add the arrival of a packet in a base chain."""
        self._visits.setdefault(number, []).append((packet, []))

    def step(self, number: str, step: KernelStep) -> None:
        """Add an event to the latest base chain of a packet."""
        visits = self._visits.setdefault(number, [])
        if not visits:
            visits.append((TracedPacket(), []))
        visits[-1][1].append(step)

    def traces(self) -> tuple[KernelTrace, ...]:
        """Return the traces in order of appearance."""
        return tuple(
            KernelTrace(
                number=number, visits=tuple(ChainVisit(packet=seen, steps=tuple(steps)) for seen, steps in visits)
            )
            for number, visits in self._visits.items()
        )


def parse(lines: Iterable[str]) -> tuple[KernelTrace, ...]:
    """Parse lines of any of the three formats. Return the traced packets in order of appearance."""
    collector = _TraceCollector()
    for line in lines:
        line = line.rstrip()
        if line.startswith("trace id "):
            _parse_nft(line, collector)
        elif "TRACE: " in line or line.startswith("PACKET: "):
            _parse_xtables(line, collector)
    return collector.traces()


def _parse_nft(line: str, collector: _TraceCollector) -> None:
    match = _NFT.match(line)
    if match is None:
        return
    number, family, table, chain, rest = match.groups()
    if rest.startswith("packet: "):
        collector.packet(number, _nft_packet(rest))
    elif rest.startswith("rule "):
        # A comment in the rule may contain the same words.
        text, _, last = rest[len("rule ") :].rpartition(" (verdict ")
        handle = _HANDLE.search(text)
        collector.step(
            number,
            KernelStep(
                family=family,
                table=table,
                chain=chain,
                event=TraceEvent.RULE,
                verdict=last.partition(")")[0],
                rule=" ".join((text[: handle.start()] if handle else text).split()),
                handle=int(handle[1]) if handle else 0,
            ),
        )
    elif rest.startswith(("policy ", "verdict ")):
        kind, _, text = rest.partition(" ")
        verdict = _VERDICT.match(f"verdict {text}")
        mark = _MARK.search(text)
        collector.step(
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


def _nft_packet(text: str) -> TracedPacket:
    # The link-layer addresses come first, so the IP addresses overwrite them.
    fields = {name: quoted or plain for name, quoted, plain in _PACKET.findall(text)}
    return TracedPacket(
        iif=fields.get("iif", ""),
        oif=fields.get("oif", ""),
        source=fields.get("saddr", ""),
        destination=fields.get("daddr", ""),
        source_port=_number(fields.get("sport", "")),
        port=_number(fields.get("dport", "")),
    )


def _parse_xtables(line: str, collector: _TraceCollector) -> None:
    packet = _XTABLES_PACKET.match(line)
    if packet is not None:
        collector.packet(packet[2], _log_packet(packet[3]))
        return
    match = _XTABLES.match(line)
    if match is not None:
        family, number, table, chain, event, handle, verdict, target, rest = match.groups()
        collector.step(
            number,
            KernelStep(
                family=_XTABLES_FAMILIES.get(family, family),
                table=table,
                chain=chain,
                event=TraceEvent(event),
                verdict=f"{verdict.lower()} {target}" if target else verdict.lower(),
                rule=rest.strip(),
                handle=int(handle, 16) if handle else 0,
            ),
        )
        return
    _parse_legacy(line, collector)


def _parse_legacy(line: str, collector: _TraceCollector) -> None:
    """Parse a line of the kernel log: `TRACE: nat:PREROUTING:rule:2 IN=eth0 OUT= SRC=… DST=…`.

    Such a line has no verdict and no packet ID, so the source address and the IP identification identify the packet.
    """
    match = _LEGACY.search(line)
    if match is None:
        return
    table, chain, event, number, rest = match.groups()
    seen = _log_packet(rest)
    words = dict(_WORDS.findall(rest))
    packet = f"{seen.source}#{words.get('ID', words.get('FLOWLBL', ''))}"
    collector.packet(packet, seen)
    mark = words.get("MARK", "0")
    collector.step(
        packet,
        KernelStep(
            family="ip6" if ":" in seen.source else "ip",
            table=table,
            chain=chain,
            event=TraceEvent(event),
            handle=int(number),
            mark=int(mark, 16) if mark.startswith("0x") else 0,
        ),
    )


def _log_packet(text: str) -> TracedPacket:
    # An ICMP error quotes another packet in brackets.
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
    """Yield the traces that started in the given table, without their events there: the probe's own rules are not a result."""
    for trace in traces:
        if trace.visits and trace.visits[0].steps and trace.visits[0].steps[0].table == table:
            others = tuple(visit for visit in trace.visits if not visit.steps or visit.steps[0].table != table)
            yield KernelTrace(number=trace.number, visits=others, probe_chain=trace.visits[0].steps[0].chain)
