"""Short answers: what an agent reads first, with a reference to the whole document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from narthex.trace.agents.requests import CheckToolRequest, PlanToolRequest, QueryToolRequest, TraceToolRequest
from narthex.trace.causes.catalogue import CAUSES

_MOST = 10
"""Entries of each list in a short answer."""


class CauseLine(msgspec.Struct, frozen=True, kw_only=True):
    """A cause, and what to do."""

    cause: str
    certain: bool
    sentence: str
    advice: str


class EndLine(msgspec.Struct, frozen=True, kw_only=True):
    """How some of the connections end."""

    probability: str
    fate: str
    address: str
    reason: str


class TraceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Where a packet ends, and why."""

    certain: bool
    """False: input is missing that decides."""
    ends: list[EndLine]
    causes: list[CauseLine]
    service: str
    missing: list[str]
    """Parts of the input that are missing; `next_command` prints one that decides."""
    next_command: str
    left_out: int
    """Ends that have no room here."""
    evidence: str
    """Reference to the TraceDocument."""


class CheckAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether rules and objects agree."""

    agrees: bool
    decided: bool
    """False: parts of the rules could not be interpreted."""
    findings: list[str]
    left_out: int
    evidence: str
    """Reference to the CheckDocument, or to the ProofDocument with `prove`."""


class FrontendLine(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a Service port and its endpoints."""

    service: str
    frontend: str
    pod: str
    """What happens to packets from pods."""
    other: str
    """What happens to packets from outside."""
    endpoints: list[str]


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The decisions for Services."""

    node: str
    mode: str
    service_ports: int
    frontends: list[FrontendLine]
    left_out: int
    evidence: str
    """Reference to the PlanDocument."""


class QueryAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The complete set of packets, as short descriptions."""

    certain: bool
    agree: bool
    """False: rules and objects give different answers."""
    lines: list[str]
    left_out: int
    evidence: str
    """Reference to the QueryDocument."""


class CausesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The causes that Narthex knows."""

    causes: dict[str, str]
    """Titles by ID."""


def causes_answer(cause: str) -> CausesAnswer:
    """Return all causes, or one. The answer is empty if there is no such cause."""
    return CausesAnswer(causes={each.id: each.title for each in CAUSES.values() if cause in ("", each.id)})


def short_answer(request: Any, document: Mapping[str, Any], evidence: str) -> Any:
    """Return the short answer to a request from the document that its command has printed."""
    match request:
        case TraceToolRequest():
            return _trace(document, evidence)
        case CheckToolRequest():
            return _check(document, evidence)
        case PlanToolRequest():
            return _plan(document, request.service, evidence)
        case QueryToolRequest():
            return _query(document, evidence)
    raise TypeError(f"{request!r} has no short answer")


def _trace(document: Mapping[str, Any], evidence: str) -> TraceAnswer:
    ends = [
        EndLine(
            probability=end["probability"],
            fate=end["fate"],
            address=f"{end['address']}:{end['port']}" if end["port"] else end["address"],
            reason=end["reason"],
        )
        for end in document["ends"]
    ]
    causes = [
        CauseLine(cause=found["cause"], certain=found["certain"], sentence=found["sentence"], advice=found["advice"])
        for found in document["findings"]
    ]
    missing = [": ".join(filter(None, (part["node"], part["part"], part["why"]))) for part in document["missing"]]
    return TraceAnswer(
        certain=all(end.fate != "unknown" for end in ends),
        ends=ends[:_MOST],
        causes=causes[:_MOST],
        service=document["service"],
        missing=missing[:_MOST],
        next_command=document["next_command"],
        left_out=max(0, len(ends) - _MOST),
        evidence=evidence,
    )


def _check(document: Mapping[str, Any], evidence: str) -> CheckAnswer:
    reports = document["reports"]
    findings = [found["said"] for report in reports for found in report.get("findings", ())]
    packets = (report.get("counterexample") for report in reports)
    findings += [f"rules and objects differ for {packet['described']}" for packet in packets if packet]
    return CheckAnswer(
        agrees=document["status"] == 0,
        decided=document["status"] != 2
        and not any(report.get("unknown") or report.get("undecided") for report in reports),
        findings=findings[:_MOST],
        left_out=max(0, len(findings) - _MOST),
        evidence=evidence,
    )


def _plan(document: Mapping[str, Any], service: str, evidence: str) -> PlanAnswer:
    lines = []
    count = 0
    for plan in document["plans"]:
        for each in plan["services"]:
            count += 1
            if service in ("", f"{each['namespace']}/{each['name']}"):
                lines += [_frontend(each, front) for front in each["frontends"]]
    return PlanAnswer(
        node=document["node"],
        mode=document["mode"],
        service_ports=count,
        frontends=lines[:_MOST],
        left_out=max(0, len(lines) - _MOST),
        evidence=evidence,
    )


def _frontend(service: Mapping[str, Any], front: Mapping[str, Any]) -> FrontendLine:
    pool = service.get("cluster") or service.get("local") or {"endpoints": ()}
    return FrontendLine(
        service=f"{service['namespace']}/{service['name']}:{service['port']}",
        frontend=f"{front['kind']} {front['address'] or ''}:{front['port']}/{front['protocol']}",
        pod=_decision(front["pod"]),
        other=_decision(front["other"]),
        endpoints=[f"{end['address']}:{end['port']}" for end in pool["endpoints"]][:_MOST],
    )


def _decision(decision: Mapping[str, Any]) -> str:
    scope = f" to {decision['scope']} endpoints" if decision.get("scope") else ""
    return f"{decision['action']}{scope}" + (", masquerade" if decision.get("masquerade") else "")


def _query(document: Mapping[str, Any], evidence: str) -> QueryAnswer:
    reports = document["reports"]
    lines = [
        f"{line['senders']} -> {line['destination']}: {line['outcome']}"
        for report in reports
        for line in report["lines"]
    ]
    return QueryAnswer(
        certain=all(report["certain"] for report in reports),
        agree=all(report["agree"] is not False for report in reports),
        lines=lines[:_MOST],
        left_out=max(0, len(lines) - _MOST),
        evidence=evidence,
    )
