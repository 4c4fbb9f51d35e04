"""The rules of the userspace backend: iptables rules that redirect to listen ports, and the relay's table.

As text, the table is one comment line for each listener, which `narthex render` prints before the rules and dumps may
contain:

    # relay tcp 61904: shop/web:http (cluster) -> 10.64.1.10:8080, 10.64.2.10:8080, affinity 10800 s
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from immutables import Map

from narthex.model import IPFamily, NamespacedName, Protocol, ServicePortName, family_of, join_port, split_port
from narthex.proxy.backends.iptables import rules as xtables
from narthex.proxy.backends.iptables.refusals import comment_text
from narthex.proxy.backends.iptables.rules import XtablesChanges, XtablesRules
from narthex.proxy.plan.ir import Scope

ListenKey = tuple[Protocol, int]
"""Protocol and port of a listener of the relay."""
Place = tuple[str, int]
"""Address and port of an endpoint."""


class RelayListener(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the relay's table: the endpoints for connections that are redirected to one port.

    A Service port has one for each of its endpoint sets in use. The rules decide which sender reaches which listener.
    """

    name: ServicePortName
    scope: Scope
    port: int
    endpoints: tuple[Place, ...]
    """Never empty, sorted."""
    affinity_seconds: int | None = None
    """A client keeps its endpoint if it returns within this time, across all listeners of the Service port."""

    @property
    def key(self) -> ListenKey:
        """Unique key of the listener."""
        return self.name.protocol, self.port


RelayListeners = Map[ListenKey, RelayListener]


def relay_record(listener: RelayListener, place: Place) -> str:
    """Return the name of the list of clients that the relay has sent to an endpoint."""
    return f"relay {listener.name} {listener.name.protocol.value} {join_port(*place)}"


class UserspaceRules(msgspec.Struct, frozen=True, kw_only=True):
    """All of our rules for one family. Equal if rules, listeners, and ports of other programs are equal."""

    tables: XtablesRules
    listeners: RelayListeners = Map()
    mark: int = 0
    """Bit of the packet mark on the relay's own connections, which the rules leave alone."""
    taken: frozenset[ListenKey] = frozenset()
    """Ports in use by other programs, as the Target found them: the next rendering avoids them."""
    unserved: Mapping[ServicePortName, str] = {}
    """Service ports that are refused although they have endpoints, with the reason."""
    rendering: object = None
    """State of the renderer for the next step; None for rules read from a kernel."""

    @property
    def family(self) -> IPFamily:
        """Family of the addresses."""
        return self.tables.family

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UserspaceRules):
            return NotImplemented
        mine, theirs = (self.tables, self.listeners, self.taken), (other.tables, other.listeners, other.taken)
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]


class UserspaceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The changes to write. New listeners are opened before the rules change, removed ones closed afterwards."""

    tables: XtablesChanges
    mark: int = 0
    """As in the rules."""
    replace: bool = False
    """The state is unknown: listeners that are not among `listen` are closed."""
    listen: tuple[RelayListener, ...] = ()
    """New listeners, and listeners with other endpoints."""
    close: tuple[ListenKey, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.replace or self.tables or self.listen or self.close)

    @property
    def transactions(self) -> int:
        """Number of nf_tables transactions."""
        return self.tables.transactions


def diff(have: UserspaceRules | None, want: UserspaceRules) -> UserspaceChanges:
    """Return the changes from one to the other; None as `have` means that everything is replaced."""
    if have is None:
        return UserspaceChanges(
            tables=xtables.diff(None, want.tables), mark=want.mark, replace=True, listen=tuple(_sorted(want.listeners))
        )
    old, new = have.listeners, want.listeners
    changed = {key: one for key, one in new.items() if (held := old.get(key)) is not one and held != one}
    return UserspaceChanges(
        tables=xtables.diff(have.tables, want.tables),
        mark=want.mark,
        listen=tuple(_sorted(changed)),
        close=tuple(sorted((key for key in old if key not in new), key=_by_port)),
    )


def patch(have: UserspaceRules, changes: UserspaceChanges) -> UserspaceRules:
    """Return the rules after the changes."""
    tables = xtables.patch(have.tables, changes.tables)
    listeners: RelayListeners = Map() if changes.replace else have.listeners
    with listeners.mutate() as mutation:
        for key in changes.close:
            del mutation[key]
        mutation.update({one.key: one for one in changes.listen})
        listeners = mutation.finish()
    return UserspaceRules(tables=tables, listeners=listeners, mark=changes.mark, taken=have.taken)


def _sorted(listeners: Mapping[ListenKey, RelayListener]) -> list[RelayListener]:
    return [listeners[key] for key in sorted(listeners, key=_by_port)]


def _by_port(key: ListenKey) -> tuple[str, int]:
    return key[0].value, key[1]


_LINE = re.compile(
    r"# relay (?P<protocol>tcp|udp) (?P<port>\d{1,5}): (?P<namespace>[^/\s]+)/(?P<name>[^:\s]+)(?::(?P<port_name>\S+))? "
    r"\((?P<scope>cluster|local)\) -> (?P<ends>.*?)(?:, affinity (?P<seconds>\d+) s)?",
    re.ASCII,
)


def table_text(listeners: Iterable[RelayListener]) -> str:
    """Return one line for each listener, by port."""
    ordered = sorted(listeners, key=lambda one: (one.port, one.name.protocol.value))
    return "".join(_line(one) for one in ordered)


def table_of(lines: Iterable[str], family: IPFamily) -> RelayListeners:
    """Return the listeners of a family in the lines of a dump; other lines are ignored.

    Raises ValueError for a line that begins like one and cannot be parsed.
    """
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
