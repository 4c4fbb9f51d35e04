"""Differences between dataplanes that no single packet shows: the questions. Each backend answers them.

Two backends behave alike where their answers are the same text, so a shared answer is written once
(`narthex.proxy.backends.traits`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from narthex.model.net import Protocol
from narthex.proxy.plan.ir import ServicePlan


class Trait(enum.Enum):
    """One question; `words` is its text."""

    words: str
    concerns: Callable[[ServicePlan], bool]
    """Returns True if the answer is relevant to a Service port."""

    def __new__(cls, value: str, words: str, concerns: Callable[[ServicePlan], bool]) -> Trait:
        """Create a member with its question and the test of relevance."""
        member = object.__new__(cls)
        member._value_ = value
        member.words = words
        member.concerns = concerns
        return member

    CHOICE = "choice", "which endpoint a new connection gets", lambda service: _has_choice(service)
    RETRY = "retry", "an endpoint that does not answer", lambda service: _has_choice(service) and _tcp(service)
    AFFINITY = "affinity", "where session affinity is remembered", lambda service: service.affinity_seconds is not None
    CONNECTIONS = "connections", "what open connections hang on", lambda service: _has_endpoints(service)
    RESTART = "restart", "what a restart of the proxy breaks", lambda service: _has_endpoints(service)
    LEAVING = "leaving", "an endpoint that leaves", lambda service: _has_endpoints(service)
    IDLE = "idle", "how long an idle connection is remembered", lambda service: _has_endpoints(service)
    INVALID = (
        "invalid",
        "packets that connection tracking calls invalid",
        lambda service: _has_endpoints(service) and _tcp(service),
    )
    FIREWALL = "firewall", "next to other software's firewall rules", lambda _: True
    VISIBLE = "visible", "what the node itself shows of Services", lambda _: True
    NEEDS = "needs", "what the node needs", lambda _: True


def _has_endpoints(service: ServicePlan) -> bool:
    return service.cluster is not None or service.local is not None


def _has_choice(service: ServicePlan) -> bool:
    return any(pool is not None and len(pool.endpoints) > 1 for pool in (service.cluster, service.local))


def _tcp(service: ServicePlan) -> bool:
    return service.name.protocol is Protocol.TCP
