"""An issue text of bundles: trace, select what the path touched, and verify that the text gives the same answer."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from narthex.model import InputError, IPFamily, Snapshot, family_of
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.find import find
from narthex.trace.issue.anonymize import Anonymizer
from narthex.trace.issue.facts import nearby, reduced_facts
from narthex.trace.issue.flow import flow_of_path
from narthex.trace.issue.objects import reduced_objects
from narthex.trace.issue.rules import reduced_ipsets, reduced_rules, reduced_servers
from narthex.trace.issue.text import IssueNode, IssueQuestion, IssueText, issue_text, read_issue_text
from narthex.trace.model import PacketPath, branch_ends, branch_steps
from narthex.trace.node.layout import FAILED, OBJECTS, SOCKETS_FILE
from narthex.trace.node.view import NOT_WALKED, view_of_bundle
from narthex.trace.program.bundle import Bundle, scrubbed
from narthex.trace.program.places import CLUSTER_DOMAIN, OUTSIDE_NAMES, TraceError, split_destination
from narthex.trace.program.travel import KnownCluster, TraceRequest, objects_of, travel

GROUPS = ("objects", "facts", "rules")
"""Parts that stay whole, one group after the other, until the text gives the same answer."""


class IssueError(InputError):
    """No text gives the same answer as the bundles."""


class MadeIssue(msgspec.Struct, frozen=True, kw_only=True):
    """An issue text."""

    text: str
    path: PacketPath
    """The path that the text explains, with the names of the text."""
    findings: tuple[CauseFinding, ...]
    whole: tuple[str, ...] = ()
    """Groups of parts that stayed whole, since less gave another answer."""

    def document(self) -> IssueDocument:
        """Return what `narthex bundle --for-issue -o json` prints."""
        return IssueDocument(text=self.text, whole=self.whole, causes=tuple(each.cause.id for each in self.findings))


class IssueDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="issue"):
    """What `narthex bundle --for-issue -o json` prints."""

    version: Literal[1] = 1
    text: str
    """The text for the tracker."""
    whole: tuple[str, ...]
    """Groups of parts that are whole in the text, since less gave another answer: `objects`, `facts`, `rules`."""
    causes: tuple[str, ...]
    """The causes that `narthex trace` finds in the text, by id."""


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question."""

    path: PacketPath
    findings: tuple[CauseFinding, ...]


def answer(question: IssueQuestion, nodes: Sequence[IssueNode]) -> Traced:
    """Trace the packet as `narthex trace --bundle` does. Raises TraceError."""
    known = _known(question, nodes)
    request = TraceRequest(
        source=question.source,
        destination=question.destination,
        node=question.node,
        iif=question.iif,
        source_port=question.source_port,
        size=question.size,
        domain=question.domain or CLUSTER_DOMAIN,
    )
    path = travel(known, request)
    views = {view.name: view for view in known.views}
    return Traced(path=path, findings=tuple(find(path, views, known.snapshot if known.has_objects else None)))


def _known(question: IssueQuestion, nodes: Sequence[IssueNode]) -> KnownCluster:
    views = tuple(view_of_bundle(node.parts, node.manifest(), f"bundle {node.node}") for node in nodes)
    held = next((found for node in nodes if (found := _object_parts(node))), {})
    cluster = objects_of(held, "bundle") if held else None
    return KnownCluster(
        views=views,
        others=OUTSIDE_NAMES,
        node_ips=question.node_ips,
        has_objects=cluster is not None,
        snapshot=cluster.snapshot if cluster is not None else Snapshot(),
    )


def _object_parts(node: IssueNode) -> dict[str, str]:
    return {path: text for path, text in node.parts.items() if path in OBJECTS}


def make_issue(question: IssueQuestion, bundles: Iterable[Bundle], key: bytes | None = None) -> MadeIssue:
    """Return the shortest text that gives the same answer as the bundles. `key` replaces names and addresses.

    Raises TraceError for a question that has no answer, and IssueError if no text gives the same one.
    """
    whole = _whole_nodes(bundles)
    expected = answer(question, whole)
    reduction = _Reduction(question, whole, expected.path)
    for count in range(len(GROUPS) + 1):
        kept = GROUPS[:count]
        content = IssueText(question=question, nodes=reduction.nodes(kept))
        made = _made(content, expected, kept)
        if made is not None:
            break
    else:
        raise IssueError("no text gives the same answer as the bundles")
    if key is None:
        return made
    for number in range(_MOST_KEYS):
        anonymizer = Anonymizer(content, hmac.digest(key, number.to_bytes(2, "big"), hashlib.sha256))
        made = _made(anonymizer.anonymized(content), expected, kept, anonymizer.addresses)
        if made is not None:
            return made
    raise IssueError("no text with other names and addresses gives the same answer as the bundles")


def _made(
    content: IssueText, expected: Traced, kept: tuple[str, ...], change: Callable[[str], str] = str
) -> MadeIssue | None:
    """Return the text if what is read from it gives the expected answer; `change` is applied to expected addresses."""
    text = issue_text(content)
    read = read_issue_text(text)
    try:
        found = answer(read.question, read.nodes)
    except TraceError:
        return None
    if summary(found) != summary(expected, change):
        return None
    return MadeIssue(text=text, path=found.path, findings=found.findings, whole=kept)


_MOST_KEYS = 64
"""Rules that choose an endpoint by a hash of addresses choose another one for other addresses. Some replacement chooses the same."""


def summary(traced: Traced, change: Callable[[str], str] = str) -> tuple[object, ...]:
    """Return what an answer says: the ends with their probabilities, the ends of replies, and the causes.

    `change` is applied to addresses.
    """
    ends = {(fate, change(ip), *more): share for (fate, ip, *more), share in traced.path.ends().items()}
    replies = sorted(
        (str(leaf.probability), reply.fate.value)
        for leaf in traced.path.leaves()
        if leaf.end.reply is not None
        for reply in branch_ends(leaf.end.reply)
    )
    causes = [(each.cause.id, each.explains) for each in traced.findings]
    return ends, replies, causes, bool(traced.path.next_command)


def _whole_nodes(bundles: Iterable[Bundle]) -> tuple[IssueNode, ...]:
    """Return the parts of bundles that a trace reads. Objects have only the fields that bundles keep."""
    nodes = []
    for bundle in bundles:
        parts = {
            path: text
            for path, text in bundle.parts.items()
            if path not in NOT_WALKED and path.startswith(("rules/", "net/")) and _says_something(text)
        }
        for path, plural in OBJECTS.items():
            if path in bundle.parts and plural != "networkpolicies":
                parts[path] = _scrubbed(plural, bundle.parts[path])
        failed = {
            each.path: each.remark
            for each in bundle.table.parts
            if each.status == FAILED and each.path not in NOT_WALKED
        }
        known = {path: why for path, why in failed.items() if path.startswith(("rules/", "net/"))}
        nodes.append(IssueNode(node=bundle.table.node, parts=parts, failed=known))
    return tuple(nodes)


def _says_something(text: str) -> bool:
    return any(line.strip() and not line.startswith("#") for line in text.split("\n"))


def _scrubbed(plural: str, text: str) -> str:
    """Return a list of objects with the fields that bundles keep. Each item has its own kind, whatever the list is."""
    try:
        data = json.loads(text)
        items = [item for item in data["items"] if isinstance(item, dict)]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
    kind, version = _KINDS[plural]
    found = scrubbed(plural, {"kind": f"{kind}List", "apiVersion": version, "items": items})
    return msgspec.json.encode(found).decode()


_KINDS = {
    "services": ("Service", "v1"),
    "endpointslices": ("EndpointSlice", "discovery.k8s.io/v1"),
    "nodes": ("Node", "v1"),
    "pods": ("Pod", "v1"),
}


class _Reduction:
    """The parts of bundles that one path touches."""

    def __init__(self, question: IssueQuestion, nodes: Sequence[IssueNode], path: PacketPath) -> None:
        self._nodes = nodes
        self._flow = flow_of_path(path)
        self._family = family_of(path.packet.destination)
        self._ends = (question.source.removeprefix("pod/"), split_destination(question.destination).name)
        passed = {step.node for step in branch_steps(path.tree)}
        self._passed = {name for name in passed if name} | {end.node for end in branch_ends(path.tree)}
        near = None
        for _ in range(2):
            for node in nodes:
                near = nearby(node.parts, self._flow, near)
        assert near is not None
        self._near = near

    def nodes(self, kept: Sequence[str]) -> tuple[IssueNode, ...]:
        """Return the nodes; groups in `kept` stay whole."""
        held = next((node for node in self._nodes if _object_parts(node)), None)
        made = []
        for node in self._nodes:
            parts: dict[str, str] = {}
            parts |= _select(node.parts, "rules/") if "rules" in kept else self._rules(node.parts)
            parts |= _select(node.parts, "net/") if "facts" in kept else self._facts(node.parts)
            if node is held:
                parts |= _object_parts(node) if "objects" in kept else self._objects(node)
            made.append(msgspec.structs.replace(node, parts=parts))
        return tuple(made)

    def _rules(self, parts: dict[str, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        ipsets: set[str] = set()
        other = "rules/ip6tables" if self._family is IPFamily.IPV4 else "rules/iptables"
        for path, text in _select(parts, "rules/").items():
            if path.startswith(other) or path in _NO_RULES:
                continue
            reduced = reduced_rules(path, text, self._family, self._flow)
            found[path] = reduced.text
            ipsets |= reduced.ipsets
        if "rules/ipset.txt" in parts:
            found["rules/ipset.txt"] = reduced_ipsets(parts["rules/ipset.txt"], self._flow, frozenset(ipsets))
        if "rules/ipvs.txt" in parts:
            found["rules/ipvs.txt"] = reduced_servers(parts["rules/ipvs.txt"], self._flow)
        return found

    def _facts(self, parts: dict[str, str]) -> dict[str, str]:
        found = reduced_facts(_select(parts, "net/"), self._family, self._flow, self._near)
        return found if SOCKETS_FILE not in parts else found | {SOCKETS_FILE: parts[SOCKETS_FILE]}

    def _objects(self, node: IssueNode) -> dict[str, str]:
        parts = _object_parts(node)
        names = {*self._passed, *(each.node for each in self._nodes)}
        return reduced_objects(parts, objects_of(parts, "bundle").snapshot, self._flow, self._ends, names)


_NO_RULES = ("rules/ipset.txt", "rules/ipvs.txt")


def _select(parts: dict[str, str], begin: str) -> dict[str, str]:
    return {path: text for path, text in parts.items() if path.startswith(begin)}
