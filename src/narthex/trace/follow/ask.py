"""The one command whose output decides what the input of a path doesn't."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from narthex.model import IPFamily, family_of
from narthex.netfilter.ast import NOT_DECODED
from narthex.trace.follow.views import NodeView
from narthex.trace.model import Fate, MissingPart, PathBranch, PathEnd, branch_ends

_TABLE = re.compile(r"table (raw|mangle|nat|filter|security|kube-proxy)\b")
_HOOK = re.compile(r"^(?:prerouting|input|forward|output|postrouting) (raw|mangle|nat|filter|security|kube-proxy) ")
"""The place at which the walk stopped, in front of its reason."""
_OWN, _ROUTES = "ip addr", "ip route show table all"
_BY_WORDS = (
    ("ipset ", "ipset save"),
    ("IPVS", "ipvsadm -S -n"),
    ("is an address of this node", _OWN),
    ("is assumed not to be an address of this node", _OWN),
    ("no rules of a Service proxy", "{tables}-save; nft list ruleset"),
    ("no routes of IPv", _ROUTES),
    (NOT_DECODED, "nft list ruleset"),
)
"""Words of a reason, and the command that prints what it lacks."""


def next_command(tree: PathBranch, destination: str, views: Sequence[NodeView], missing: Sequence[MissingPart]) -> str:
    """Return the command to run next, ready to paste, or an empty text if the ends of the path need no more input.

    What an end that is unknown lacks comes before what the others assume, and rules come before routes.
    """
    family = family_of(destination)
    ends = sorted(branch_ends(tree), key=lambda end: end.fate is not Fate.UNKNOWN)
    for end in ends:
        for text in _lacks(end):
            command = _command(text, family, views)
            if command:
                return command
    without_routes = any(part.part == "routes" for part in missing)
    undecided = any(end.fate in (Fate.UNKNOWN, Fate.LEAVES) for end in ends)
    return _family_form(_ROUTES, family) if without_routes and undecided else ""


def _lacks(end: PathEnd) -> Iterator[str]:
    if end.fate is Fate.UNKNOWN:
        yield end.reason
    yield from end.supposing


def _command(text: str, family: IPFamily, views: Sequence[NodeView]) -> str:
    tool = "ip6tables" if family is IPFamily.IPV6 else "iptables"
    for words, command in _BY_WORDS:
        if words in text:
            return _family_form(command.format(tables=tool), family)
    table = _TABLE.search(text) or _HOOK.match(text)
    if table is None:
        return ""
    for view in views:
        rules = view.rules.get(family) if view.rules is not None else None
        gaps = rules.gaps if rules is not None else ()
        found = next((gap.command for gap in gaps if gap.command and gap.table == table[1]), "")
        if found:
            return found
    if table[1] == "kube-proxy":
        return f"nft list table {'ip6' if family is IPFamily.IPV6 else 'ip'} kube-proxy"
    return f"{tool}-save -t {table[1]}"


def _family_form(command: str, family: IPFamily) -> str:
    if family is IPFamily.IPV6 and command.startswith("ip route"):
        return command.replace("ip ", "ip -6 ", 1)
    return command
