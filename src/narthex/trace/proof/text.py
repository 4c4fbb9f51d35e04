"""A proof as text."""

from __future__ import annotations

from collections.abc import Iterator

from narthex.model import join_port
from narthex.trace.proof.changes import ChangeReport
from narthex.trace.proof.prove import CounterexamplePacket, ProofEnd, ProofOutcome, ProofReport, UndecidedRule

_MOST_ENDS = 12


def proof_lines(report: ProofReport) -> Iterator[str]:
    """Yield the lines of a report."""
    yield f"{_about(report)}: {_verdict(report)}"
    if report.counterexample is not None:
        yield from _counterexample(report.counterexample)
    yield from _undecided(report.undecided)
    if report.outcome is ProofOutcome.PROVED:
        for parameter in report.parameters:
            yield f"  given: {parameter}"
    for deviation in report.deviations:
        yield f"  declared: {deviation}"
    if report.rounding:
        yield f"  declared: probabilities are 1/n to within {report.rounding:.1e}, as the kernel can store them"


def change_lines(report: ChangeReport) -> Iterator[str]:
    """Yield the lines of a report about changes: one for each change."""
    yield f"{_about(report)}: {_change_verdict(report)}"
    for change in report.changes:
        yield f"  {change.described}"
    if report.more:
        yield f"  {report.more:,} more lines"
    yield from _undecided(report.undecided)
    if report.outcome is ProofOutcome.PROVED:
        for parameter in report.parameters:
            yield f"  given: {parameter}"


def _change_verdict(report: ChangeReport) -> str:
    if report.outcome is ProofOutcome.PROVED:
        return f"no packet changes its outcome (proved for all 2^{report.bits} packets of {report.family})"
    if report.outcome is ProofOutcome.UNDECIDED:
        return "undecided"
    classes = f"{report.classes:,} classes of packets change" if report.classes > 1 else "one class of packets changes"
    return f"{classes} from {report.before} to {report.after}"


def _undecided(rules: tuple[UndecidedRule, ...]) -> Iterator[str]:
    for rule in rules:
        yield f"  undecided: {rule.rule}: {rule.share:.3%} of all packets, such as {rule.described}"


def _about(report: ProofReport | ChangeReport) -> str:
    words = [f"node {report.node}"] if report.node else []
    words.append(report.family)
    if isinstance(report, ProofReport) and report.service:
        words.append(f"Service {report.service}")
    return ", ".join(words)


def _verdict(report: ProofReport) -> str:
    if report.outcome is ProofOutcome.PROVED:
        which = f"packets to {report.service}" if report.service else f"2^{report.bits} packets"
        return f"proved for all {which} ({report.classes:,} classes)"
    if report.outcome is ProofOutcome.DIFFERENT:
        return f"rules and objects differ for {report.differing:,} classes of packets"
    return "undecided"


def counterexample_words(packet: CounterexamplePacket) -> str:
    """Return a counterexample as a clause."""
    _, example, rules, plan, *_ = (line.strip() for line in _counterexample(packet))
    return f"{packet.described}, {example.replace('a packet of it: ', 'such as ')}: {rules}, {plan}"


def _counterexample(packet: CounterexamplePacket) -> Iterator[str]:
    to = join_port(packet.destination, packet.port) if packet.port else packet.destination
    link = f"on link {packet.link}" if packet.link else "of this node"
    yield f"  the smallest class: {packet.described}"
    yield f"  a packet of it: {packet.protocol} {packet.source} -> {to}, {link}"
    yield f"    rules: {_ends(packet.rules)}"
    yield f"    plan:  {_ends(packet.plan)}"
    if not packet.confirmed:
        yield "    the walk of this packet does not confirm it: only a longer history of packets shows the difference"


def _ends(ends: tuple[ProofEnd, ...]) -> str:
    texts = [
        f"{end.endpoint or end.end}{' masqueraded' if end.masquerade else ''}"
        + (f" ({end.probability})" if end.probability != "1" else "")
        for end in ends
    ]
    more = [f"{len(texts) - _MOST_ENDS} more"] if len(texts) > _MOST_ENDS else []
    return ", ".join(texts[:_MOST_ENDS] + more) or "only for senders that an affinity list has"
