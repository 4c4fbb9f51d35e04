"""The relay's table as text: one comment line for each listener, which `narthex render` writes before the rules and dumps
may therefore hold.

    # relay tcp 61904: shop/web:http (cluster) -> 10.64.1.10:8080, 10.64.2.10:8080, affinity 10800 s
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from immutables import Map

from narthex.model.names import NamespacedName, ServicePortName
from narthex.model.net import IPFamily, Protocol, family_of, join_port, split_port
from narthex.proxy.backends.iptables.refusals import comment_text
from narthex.proxy.backends.userspace.rules import RelayListener, RelayListeners
from narthex.proxy.plan.ir import Scope

_LINE = re.compile(
    r"# relay (?P<protocol>tcp|udp) (?P<port>\d{1,5}): (?P<namespace>[^/\s]+)/(?P<name>[^:\s]+)(?::(?P<port_name>\S+))? "
    r"\((?P<scope>cluster|local)\) -> (?P<ends>.*?)(?:, affinity (?P<seconds>\d+) s)?",
    re.ASCII,
)


def table_text(listeners: Iterable[RelayListener]) -> str:
    """One line for each, by port."""
    ordered = sorted(listeners, key=lambda one: (one.port, one.name.protocol.value))
    return "".join(_line(one) for one in ordered)


def table_of(lines: Iterable[str], family: IPFamily) -> RelayListeners:
    """The listeners of a family among lines of a dump; others are passed over. Raises ValueError for a line that begins
    like one and cannot be read."""
    found: dict[tuple[Protocol, int], RelayListener] = {}
    for line in lines:
        match = _LINE.fullmatch(line.strip())
        if match is None:
            if line.startswith("# relay "):
                raise ValueError(f"{line!r} is no line of a relay's table")
            continue
        ends = tuple(split_port(text) for text in match["ends"].split(", "))
        if any(family_of(address) is not family for address, _ in ends):
            continue
        service = NamespacedName(match["namespace"], match["name"])
        one = RelayListener(
            name=ServicePortName(service, match["port_name"] or "", Protocol(match["protocol"].upper())),
            scope=Scope(match["scope"]),
            port=int(match["port"]),
            endpoints=ends,
            affinity_seconds=int(match["seconds"]) if match["seconds"] else None,
        )
        found[one.key] = one
    return Map(found)


def _line(one: RelayListener) -> str:
    ends = ", ".join(join_port(*place) for place in one.endpoints)
    affinity = "" if one.affinity_seconds is None else f", affinity {one.affinity_seconds} s"
    where = f"# relay {one.name.protocol.lower} {one.port}"
    return f"{where}: {comment_text(str(one.name))} ({one.scope.value}) -> {ends}{affinity}\n"
