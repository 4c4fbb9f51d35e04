"""What a packet and its reply were on their way: the headers by which rules, routes, and objects are selected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from narthex.model import contains
from narthex.netfilter import ast
from narthex.trace.model import Header, PacketPath, PathBranch, branch_ends, branch_steps


class IssueFlow(msgspec.Struct, frozen=True, kw_only=True):
    """The headers that occurred, and what else the packet's way names."""

    headers: tuple[Header, ...]
    addresses: frozenset[str]
    """Addresses of the headers and of ends."""
    links: frozenset[str]

    @property
    def ports(self) -> frozenset[int]:
        """The destination ports of the headers, without unknown ones."""
        return frozenset(each.port for each in self.headers if each.port)


def flow_of_path(path: PacketPath) -> IssueFlow:
    """Return the flow of a path and of its replies."""
    headers = dict.fromkeys((path.packet, *_headers(path.tree)))
    ends = [end for branch in _trees(path.tree) for end in branch_ends(branch)]
    addresses = {ip for each in headers for ip in (each.source, each.destination)}
    addresses |= {ip for end in ends for ip in (end.address, end.source, *(each.address for each in end.may))}
    links = {link for each in headers for link in (each.iif, each.oif)}
    return IssueFlow(
        headers=tuple({_without_link(each): None for each in headers}),
        addresses=frozenset(addresses - {""}),
        links=frozenset(links - {""}),
    )


def _without_link(header: Header) -> Header:
    return msgspec.structs.replace(header, iif="", oif="", mark=0, masqueraded=False)


def _trees(tree: PathBranch) -> Iterator[PathBranch]:
    """Yield a tree and the trees of the replies at its ends."""
    yield tree
    for end in branch_ends(tree):
        if end.reply is not None:
            yield from _trees(end.reply)


def _headers(tree: PathBranch) -> Iterator[Header]:
    for branch in _trees(tree):
        for step in branch_steps(branch):
            yield from (each for each in (step.before, step.after) if each is not None)


def named(text: str, addresses: Iterable[str]) -> bool:
    """Return True if a network contains one of the addresses, or if the text is no network."""
    return any(_contains(text, each) is not False for each in addresses)


# ---- can a rule match? -------------------------------------------------------------------------------------------------


def may_match(rule: ast.Rule, headers: Iterable[Header], element_of: Callable[[ast.InSet, Header], bool]) -> bool:
    """Return False if the rule certainly matches none of the headers; `element_of` decides about named sets."""
    return any(not any(_excludes(each, header, element_of) for each in rule.expressions) for header in headers)


def _excludes(one: ast.Expression, header: Header, element_of: Callable[[ast.InSet, Header], bool]) -> bool:
    """Return True if a match certainly fails. What is not known of the header may have any value."""
    match one:
        case ast.Compare(field, values, negate):
            found = [_equals(field, value, header) for value in values]
            return (True in found) if negate else all(each is False for each in found)
        case ast.PortRange(field, first, last, negate):
            port = header.port if field is ast.Field.DPORT else header.source_port if field is ast.Field.SPORT else 0
            return port is not None and port > 0 and (first <= port <= last) is negate
        case ast.AnyOf(alternatives, False):
            return all(any(_excludes(each, header, element_of) for each in some) for some in alternatives)
        case ast.InSet(negate=False):
            return not element_of(one, header)
    return False


def _equals(field: ast.KeyPart, value: ast.Atom, header: Header) -> bool | None:
    """Return True if the header has the value, None if that is not known."""
    if field is ast.Field.L4PROTO:
        return str(value) == header.protocol if header.protocol != "icmp" else None
    if field in (ast.Field.DPORT, ast.Field.SPORT):
        port = header.port if field is ast.Field.DPORT else header.source_port
        return port == value if port else None
    if field in (ast.Field.DADDR, ast.Field.SADDR):
        held = header.destination if field is ast.Field.DADDR else header.source
        return _contains(str(value), held) if held else None
    return None


def _contains(text: str, address: str) -> bool | None:
    try:
        return contains(text, address)
    except ValueError:
        return None


def element_may_match(key: ast.Key, element: ast.ElementKey, header: Header) -> bool:
    """Return False if the element of a set certainly does not match the header."""
    return all(_equals(part, atom, header) is not False for part, atom in zip(key, element, strict=False))
