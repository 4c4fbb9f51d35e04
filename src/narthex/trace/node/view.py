"""A `NodeView` from the output of a node's tools: the parts of a bundle, or single files that are recognized by their text."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from narthex.model import FAMILIES, IPFamily
from narthex.model.lines import without_long_lines_of
from narthex.netfilter.ast import Ruleset
from narthex.netfilter.dump.dump import GapKind
from narthex.netfilter.dump.read import Dump, DumpError, merge_dumps, read_dump
from narthex.netfilter.walk.state import KernelObjects
from narthex.proxy.backends.sockets.document import SocketDocument
from narthex.trace.follow.views import DEFAULT, LOCAL, MAIN, NodeView, PolicyRule
from narthex.trace.node import network as links
from narthex.trace.node import routes
from narthex.trace.node.layout import CNI_FILE, FAILED, PARTS, SOCKETS_FILE, TAKEN, BundleManifest
from narthex.trace.node.network import LINE, ConntrackListing, listeners_of
from narthex.trace.node.socket_maps import foreign_maps_message, foreign_socket_maps

T = TypeVar("T")
_SOCKETS = msgspec.json.Decoder(SocketDocument)

_RULES = "rules/"
NOT_WALKED = ("rules/nft.json", "rules/ipvs-stats.txt")
"""Parts of a bundle that another part has in a form that is walked."""
UNUSED = frozenset((*NOT_WALKED, CNI_FILE, *(part.path for part in PARTS if part.path.startswith("about/"))))
"""Parts of a bundle that no view has."""


_READERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "addresses": links.addresses_of,
    "links": links.links_of,
    "neighbours": links.neighbours_of,
    "fdb": links.fdb_of,
}


def view_of_bundle(parts: Mapping[str, str], table: BundleManifest, origin: str) -> NodeView:
    """Return the view of a bundle. A part that can't be read counts as absent, with the reason."""
    parts, too_long = _short_lines(parts)
    reader = _Reader(parts, {taken.path: taken.remark for taken in table.parts if taken.status != TAKEN})
    texts = [(path, text) for path, text in parts.items() if path.startswith(_RULES) and path not in NOT_WALKED]
    # Several flavours may be installed without either having a rule; a tool that failed is another matter.
    failed = tuple(
        f"{taken.path}: {taken.remark or taken.status}"
        for taken in table.parts
        if taken.path.startswith(_RULES) and taken.path not in NOT_WALKED and taken.status == FAILED
    )
    conntrack = [parts[path] for path in ("net/conntrack-4.txt", "net/conntrack-6.txt") if path in parts]
    if not conntrack:
        reader.absent["connections"] = reader.why.get("net/conntrack-4.txt", "not in the bundle")
    if not texts:
        reader.absent["rules"] = reader.why.get("rules/iptables-nft.txt", "not in the bundle")
    not_read = [taken.remark for taken in table.parts if taken.path == SOCKETS_FILE and taken.status == FAILED]
    if not_read:
        reader.absent["sockets"] = not_read[0]
    lists: dict[str, Any] = {field: reader.one(field, f"net/{field}.json", read) for field, read in _READERS.items()}
    return NodeView(
        **lists,
        name=table.node,
        origin=origin,
        rules=RulesByFamily(texts) if texts else None,
        partial=(*failed, *too_long),
        routes=reader.both("routes", "net/routes-{}.json", routes.routes_of),
        policies=reader.both("policies", "net/policies-{}.json", routes.policies_of),
        listeners=listeners_of(parts["net/listeners.txt"]) if "net/listeners.txt" in parts else None,
        connections=ConntrackListing("\n".join(conntrack)) if conntrack else None,
        sysctls=settings_of(parts["net/sysctls.txt"]) if "net/sysctls.txt" in parts else None,
        absent=reader.absent,
        sockets=sockets_of(parts.get(SOCKETS_FILE), reader.absent),
    )


def sockets_of(text: str | None, absent: dict[str, str]) -> SocketDocument | None:
    """Return the maps of socket load balancing in a bundle's text; None if there is none, or with a reason in `absent`."""
    if text is None:
        return None
    try:
        return _SOCKETS.decode(text)
    except msgspec.DecodeError as error:
        absent["sockets"] = f"{SOCKETS_FILE} cannot be read: {error}"
        return None


def _short_lines(parts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the parts without lines that are too long, and messages about these. `read_dump` looks at those of rules."""
    found: dict[str, str] = {}
    said: list[str] = []
    for path, text in parts.items():
        found[path] = text
        if path.endswith(".txt") and not path.startswith(_RULES):
            found[path], message = without_long_lines_of(text)
            said += [f"{path}: {message}"] if message else []
    return found, said


class _Reader:
    """Reads parts, and records why a part is missing."""

    def __init__(self, parts: Mapping[str, str], why: dict[str, str]) -> None:
        self._parts = parts
        self.why = why
        self.absent: dict[str, str] = {}

    def one(self, field: str, path: str, read: Callable[[Any], T]) -> T | None:
        """Read one part; if it is missing or not readable, record the reason and return None."""
        if path not in self._parts:
            self.absent[field] = self.why.get(path) or "not in the bundle"
            return None
        try:
            return read(json.loads(self._parts[path] or "[]"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self.absent[field] = f"{path} cannot be read: {error}"
            return None

    def both(self, field: str, path: str, read: Callable[..., tuple[T, ...]]) -> tuple[T, ...] | None:
        """Read a part that exists for both IP families."""
        found: list[T] = []
        for family in FAMILIES:
            one = self.one(field, path.format(family.value), partial(read, family=family))
            if one is None and family is IPFamily.IPV4:
                return None
            found += one or ()
        self.absent.pop(field, None)
        return tuple(found)


def settings_of(text: str) -> dict[str, str]:
    """Read the output of `sysctl -a`, by name."""
    found = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and name.strip().startswith("net."):
            found[name.strip()] = " ".join(value.split())
    return found


# ---- single files --------------------------------------------------------------------------------------------------

_KEYS: tuple[tuple[str, str], ...] = (
    # the field of a view, and a key that only entries of its JSON have
    ("addresses", "addr_info"),
    ("links", "linkinfo"),
    ("links", "link_type"),
    ("policies", "priority"),
    ("neighbours", "lladdr"),
    ("fdb", "mac"),
    ("routes", "dst"),
)


def view_of_files(files: Sequence[tuple[str, str]], name: str = "") -> NodeView:
    """Return the view of (file name, text) pairs.

    A text that isn't recognized is named in `NodeView.partial`. Raises DumpError if none of them is recognized.
    """
    view = NodeView(name=name, origin="rules " + " ".join(file for file, _ in files), copied=True)
    rules: list[Dump] = []
    unused: list[str] = []
    for file, text in files:
        other = _other_than_rules(view, file, text)
        view.said = (*view.said, *_reported_faults(text))
        foreign = foreign_socket_maps(file, text)
        if foreign:
            view.partial = (*view.partial, foreign_maps_message(file, foreign))
        found = read_dump(text, file)
        if found.tables or found.sets or found.servers:
            rules.append(found)
        elif not other and not foreign:
            unused.append(f"{file}: holds nothing that is known: no rules, sets, routes, links, connections, settings")
    if len(unused) == len(files):
        raise DumpError("; ".join(unused) or "no file is given")
    view.partial = (*view.partial, *unused)
    view.policies = _with_standard_policies(view.policies)
    view.rules = RulesByFamily(dumps=rules) if rules else None
    for field in ("rules", "links", "addresses", "routes", "policies", "neighbours", "fdb", "connections", "sysctls"):
        if getattr(view, field) is None:
            view.absent = {field: "no file contains it", **view.absent}
    return view


def _with_standard_policies(found: tuple[PolicyRule, ...] | None) -> tuple[PolicyRule, ...] | None:
    """Return policy rules with the standard ones of the kernel, which a text with some lines of `ip rule` may lack."""
    if found is None:
        return None
    standard = [
        PolicyRule(family=family, priority=priority, table=table, text=f"{priority}: from all lookup {table}")
        for family in {rule.family for rule in found}
        for priority, table in ((0, LOCAL), (32766, MAIN), (32767, DEFAULT))
        if not any(rule.family is family and rule.table == table for rule in found)
    ]
    return (*found, *standard)


def _other_than_rules(view: NodeView, file: str, text: str) -> bool:
    """Add everything in a text but rules to the view, since a bug report may contain all of it; return True if there was any."""
    if text.lstrip().startswith("[") and _json(view, text):
        return True
    # The JSON of `ip -j` is one line, possibly between others.
    in_lines = [line for line in text.split("\n") if line.startswith("[{") and _json(view, line)]
    text, message = without_long_lines_of(_without_rules(text))
    if message:
        view.partial = (*view.partial, f"{file}: {message}")
    text = _EMPTY_LINES.sub("\n\n", text)
    found_routes, found_policies = routes.route_lines(text), routes.policy_lines(text)
    if found_routes:
        view.routes = (*(view.routes or ()), *found_routes)
    listed = links.link_lines(text)
    if listed.whole:
        view.links = view.links or listed.links
        view.addresses = (*(view.addresses or ()), *listed.addresses) if listed.addresses else view.addresses
    elif listed.links:
        names = ", ".join(link.name for link in listed.links[:5])
        view.absent = {
            **view.absent,
            **{
                field: f"the input contains only {names}"
                for field in ("links", "addresses")
                if not getattr(view, field)
            },
        }
    sockets = listeners_of(text)
    if sockets:
        view.listeners = (*(view.listeners or ()), *sockets)
    if found_policies:
        view.policies = (*(view.policies or ()), *found_policies)
    settings = settings_of(text)
    if settings:
        view.sysctls = {**(view.sysctls or {}), **settings}
    connections = LINE.search(text) is not None
    if connections:
        view.connections = ConntrackListing(text)
    return bool(found_routes or found_policies or settings or connections or listed.links or sockets or in_lines)


_FAULTS = re.compile(
    r"^.*(?:iptables-legacy tables present|Failed to execute iptables-restore|ip6?tables-restore: line \d+ failed"
    r"|nftables sync failed|Failed to load (?:the )?rules|Failed to sync (?:iptables|nftables|ipvs)).*$",
    re.MULTILINE | re.IGNORECASE,
)
_FAULT_WORDS = ("ailed", "AILED", "present", "PRESENT")
"""Each line that `_FAULTS` matches has one of them. To change the case of a large dump takes longer than to search it."""
_MOST_FAULTS = 20
"""Lines to keep: a proxy that fails repeats its message each time."""


def _reported_faults(text: str) -> tuple[str, ...]:
    """Return the lines in which programs report a fault, each once."""
    short, _ = without_long_lines_of(text)
    if not any(word in short for word in _FAULT_WORDS):
        return ()  # the expression takes seconds for a dump of 200,000 rules
    lines = (match[0].strip() for match in itertools.islice(_FAULTS.finditer(short), _MOST_FAULTS))
    return tuple(dict.fromkeys(lines))


_EMPTY_LINES = re.compile(r"\n{3,}+")
"""What is left of the rules of a dump. Each reader of the rest would look at 200,000 empty lines."""


def _without_rules(text: str) -> str:
    """Return the text with empty lines in place of those that can only be rules, of which a dump has up to 200,000."""
    return "\n".join(
        line
        if line
        and line[0] not in "-:*#"
        and (line[0] != "[" or "]" not in line[:24])
        and (line[0] != "\t" or "nexthop" in line)
        else ""
        for line in text.split("\n")
    )


def _json(view: NodeView, text: str) -> bool:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return False
    entries = [entry for entry in data if isinstance(entry, dict)]
    field = next((field for field, key in _KEYS if any(key in entry for entry in entries)), "")
    try:
        if field in ("routes", "policies"):
            family = _family(entries)
            found = routes.routes_of(entries, family) if field == "routes" else routes.policies_of(entries, family)
            setattr(view, field, (*(getattr(view, field) or ()), *found))
        elif field:
            setattr(view, field, _READERS[field](entries))
        if field == "addresses":
            view.links = view.links or links.links_of(entries)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    return bool(field)


def _family(entries: Iterable[dict[str, Any]]) -> IPFamily:
    words = (str(entry.get(key, "")) for entry in entries for key in ("dst", "src", "gateway", "prefsrc"))
    return IPFamily.IPV6 if any(":" in word for word in words) else IPFamily.IPV4


Texts = Sequence[tuple[str, str]]
"""Names, for messages, and the output of tools."""


class DumpedRules:
    """The rules of one IP family in dumps, as `NodeRules`."""

    def __init__(self, held: Dump, family: IPFamily, *, copied: bool) -> None:
        """Take the dump and select one IP family. `copied`: a person copied the text, so that parts may be missing."""
        rules = held.for_family(family)
        self.ruleset: Ruleset = rules.ruleset
        self.assumed: Ruleset = rules.copied if copied else rules.ruleset
        self.objects: KernelObjects = rules.objects
        self.comments = rules.comments
        self.unread = tuple(map(str, held.problems))
        # A tool that a bundle or a live node has run prints every table that there is.
        self.gaps = tuple(gap for gap in rules.gaps if copied or gap.kind is not GapKind.TABLE)
        self._rules = rules

    def place(self, table: str, chain: str, rule: int, what: str = "") -> tuple[str, str]:
        """Return position ("nat.txt:214") and text of a rule, both empty if not known."""
        return self._rules.place(table, chain, rule, what)


class RulesByFamily(Mapping[IPFamily, DumpedRules]):
    """Rules by IP family, read on demand: a dump of 200,000 rules usually has one family."""

    def __init__(self, texts: Texts = (), dumps: Sequence[Dump] = ()) -> None:
        """Take texts that are read on demand, or dumps that have been read."""
        self._texts = [(name, text) for name, text in texts if _says_something(text)]
        self._copied = bool(dumps)
        self._dump: Dump | None = merge_dumps(dumps) if dumps else None
        self._held: dict[IPFamily, DumpedRules] = {}

    def __getitem__(self, family: IPFamily) -> DumpedRules:
        """Return the rules of an IP family, reading them on the first call."""
        if self._dump is None:
            self._dump = merge_dumps(read_dump(text, name, _rules_family(name)) for name, text in self._texts)
        if family not in self._held:
            self._held[family] = DumpedRules(self._dump, family, copied=self._copied)
        return self._held[family]

    def __iter__(self) -> Iterator[IPFamily]:
        return iter(FAMILIES)

    def __len__(self) -> int:
        return len(FAMILIES)


def _rules_family(name: str) -> IPFamily | None:
    """Return the IP family by the name of a bundle's file."""
    if name.startswith("rules/ip6tables"):
        return IPFamily.IPV6
    return IPFamily.IPV4 if name.startswith("rules/iptables") else None


def _says_something(text: str) -> bool:
    """Return True if a text has more than comments: a tool without rules prints nothing, or a heading."""
    return any(line.strip() and not line.startswith("#") for line in text.split("\n"))
