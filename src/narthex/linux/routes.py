"""Route lookups in a network namespace."""

from __future__ import annotations

import json

import msgspec

from narthex.linux.run import CommandError, run
from narthex.model.net import address


class RouteHop(msgspec.Struct, frozen=True, kw_only=True):
    """The first hop towards an address."""

    device: str = ""
    """Outgoing interface."""
    via: str = ""
    """Next router; empty when the address is on the link."""
    local: bool = False
    """The address is this node's own."""
    problem: str = ""
    """The kernel's reason for the absence of a route."""


def next_hop(destination: str, namespace: str | None = None) -> RouteHop:
    """Return the kernel's route to a canonical address. Raises ValueError for any other text.

    Raises FileNotFoundError without the program `ip` or without the namespace.
    """
    if address(destination) != destination:
        raise ValueError(f"{destination!r} is not a canonical address")
    try:
        answer = run(["ip", "-j", "route", "get", destination], namespace=namespace, timeout=10)
    except CommandError as error:
        return RouteHop(problem=error.said.strip().removeprefix("RTNETLINK answers: ") or "no route")
    return read_answer(answer)


def read_answer(answer: str) -> RouteHop:
    """Decode the JSON of `ip -j route get`."""
    found = json.loads(answer)[0]
    if found.get("type") in ("unreachable", "blackhole", "prohibit"):
        return RouteHop(problem=found["type"])
    via = found.get("gateway") or found.get("via", {}).get("host", "")
    return RouteHop(device=found.get("dev", ""), via=via, local=found.get("type") == "local")
