"""Reports from inputs: objects against a node's kernel (check), effects of a change of mode (migrate), counters (top)."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from narthex.model import FAMILIES, Host, InputError, IPFamily, NamespacedName, Snapshot, family_of
from narthex.netfilter.dump.dump import GapKind
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.ipvs.names import CLUSTER_IP, set_name
from narthex.proxy.backends.userspace.names import CONTAINER
from narthex.proxy.backends.userspace.rules import table_of
from narthex.proxy.plan.ir import Deviation, Plan
from narthex.trace.follow.views import NodeRules, NodeView
from narthex.trace.node.layout import CNI_FILE, PARTS, SOCKETS_FILE
from narthex.trace.node.network import ConntrackListing
from narthex.trace.node.view import sockets_of
from narthex.trace.program.bundle import gather, read_bundle
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.proof.changes import ChangeReport
from narthex.trace.proof.prove import ProofReport, prove, undecided
from narthex.trace.proof.referred import ReferredObjects
from narthex.trace.query.answer import QueryReport
from narthex.trace.reports.check import CheckReport, check
from narthex.trace.reports.counting import CounterReading, Names, count
from narthex.trace.reports.migration.changes import ModeSetup, compare, factors, serving
from narthex.trace.reports.migration.report import MigrationReport, NodeChange, differences, grouped
from narthex.trace.reports.socket_check import with_sockets

SERVICE_LINKS = ("kube-ipvs0", "nodelocaldns")
"""Links that hold addresses of Services."""


def check_reports(
    cluster: ClusterObjects, view: NodeView, options: NodeOptions
) -> tuple[tuple[CheckReport, ...], tuple[str, ...]]:
    """Return a report for each IP family, and problems of the objects. Raises InputError."""
    known = any(key.name == view.name for key in cluster.snapshot.nodes)
    name = options.node or (view.name if known else "")
    inputs = node_inputs(cluster, msgspec.structs.replace(options, node=name))
    return compare_node(inputs, view), inputs.problems


def compare_node(inputs: NodeInputs, view: NodeView) -> tuple[CheckReport, ...]:
    """Return a report for each IP family about one node."""
    own = view.own_addresses(SERVICE_LINKS)
    first = [ip for ip in inputs.host.addresses if ip in own or not own]
    addresses = (*first, *(ip for ip in own if ip not in first))
    found = []
    for family in inputs.families:
        plan = inputs.plan(family)
        report = check(plan, view, tuple(ip for ip in addresses if family_of(ip) is family))
        found.append(with_sockets(report, plan, view))
    return tuple(found)


def proof_reports(
    cluster: ClusterObjects, view: NodeView, options: NodeOptions, service: NamespacedName | None
) -> tuple[tuple[ProofReport, ...], tuple[str, ...]]:
    """Return a proof for each IP family, and problems of the objects. Raises InputError."""
    known = any(key.name == view.name for key in cluster.snapshot.nodes)
    name = options.node or (view.name if known else "")
    inputs = node_inputs(cluster, msgspec.structs.replace(options, node=name))
    plans = [inputs.plan(family) for family in inputs.families]
    if service is not None:
        plans = [plan for plan in plans if any(each.service == service for each in plan.services)]
        if not plans:
            raise InputError(f"Service {service} has no frontend on this node: check the name, NAMESPACE/NAME")
    addresses = dict.fromkeys((*inputs.host.addresses, *view.own_addresses(SERVICE_LINKS)))
    host = Host(addresses=tuple(addresses))
    collecting = gc.isenabled()
    gc.disable()  # the sets form no cycles, and collections would take as long as the proof
    try:
        return tuple(_proof(plan, view, host, service) for plan in plans), inputs.problems
    finally:
        if collecting:
            gc.enable()


_NFT_TABLES = ("narthex", "kube-proxy")
KUBE_PROXY_NFTABLES = frozenset({Deviation.NO_CONSISTENT_HASHING, Deviation.NO_LEAST_CONNECTIONS})
"""The deviations of kube-proxy in mode nftables: it masquerades every endpoint's connections to itself."""


def _proof(plan: Plan, view: NodeView, host: Host, service: NamespacedName | None) -> ProofReport:
    held = view.rules.get(plan.family) if view.rules is not None else None
    reasons = obstacles(view, plan.family)
    if held is None:
        return undecided(plan, service, reasons)
    referred = ReferredObjects(held.objects)
    if _has_relay(held, plan.family):
        try:
            referred = ReferredObjects(held.objects, table_of(held.comments, plan.family))
        except ValueError as error:
            reasons += (str(error),)
        if not referred.listeners and plan.services:
            reasons += ("the table of the relay is not in the input: `narthex render` prints it above the rules",)
    if reasons:
        return undecided(plan, service, reasons)
    return prove(plan, held.ruleset, host, deviations_of_rules(held, plan.family), service, referred)


def mode_of_rules(held: NodeRules, family: IPFamily) -> str:
    """Return the mode whose rules a node has; iptables if there is no sign of another one."""
    if _table_names(held, family).intersection(_NFT_TABLES):
        return "nftables"
    if _has_relay(held, family):
        return "userspace"
    return "ipvs" if held.objects.servers and set_name(CLUSTER_IP, family) in held.objects.sets else "iptables"


def deviations_of_rules(held: NodeRules, family: IPFamily) -> frozenset[Deviation]:
    """Return the deviations from the plan that are declared for the rules of a node."""
    ours, others = _NFT_TABLES
    names = _table_names(held, family)
    return (
        KUBE_PROXY_NFTABLES
        if others in names and ours not in names
        else BACKENDS[mode_of_rules(held, family)].deviations
    )


def _table_names(held: NodeRules, family: IPFamily) -> set[str]:
    return {table.name for table in held.ruleset.tables if table.family in (None, family)}


def _has_relay(held: NodeRules, family: IPFamily) -> bool:
    return any(CONTAINER in table.chains for table in held.ruleset.tables if table.family in (None, family))


def families_of_rules(views: Sequence[NodeView]) -> list[IPFamily]:
    """Return the IP families for which a view has tables; IPv4 if there are none."""
    held = [view.rules for view in views if view.rules is not None]
    found = [
        family
        for family in FAMILIES
        if any(table.family in (None, family) for rules in held for table in rules[family].ruleset.tables)
    ]
    return found or [IPFamily.IPV4]


def obstacles(view: NodeView, family: IPFamily, tolerated: GapKind | None = None) -> tuple[str, ...]:
    """Return why nothing can be proved of a node's rules: they are not known, or not complete.

    Gaps of the kind `tolerated` are left out.
    """
    held = view.rules.get(family) if view.rules is not None else None
    if held is None:
        why = view.absent.get("rules", "")
        return ("the node's rules are unknown" + (f": {why}" if why else ""),)
    reasons = [*held.unread, *(f"the input is partial: {gap}" for gap in held.gaps if gap.kind is not tolerated)]
    if held.ruleset.copied:
        reasons.append(
            "the rules were copied by a person, so that lines may be missing: use a bundle or a complete dump"
        )
    return tuple(reasons)


def status(reports: Sequence[CheckReport | ProofReport | ChangeReport | QueryReport]) -> int:
    """Return the exit status: 0 without differences, 1 with differences, 2 if it can't be decided."""
    every = {report.status for report in reports}
    return 1 if 1 in every else 2 if 2 in every or not every else 0


_RULES = tuple(part.path for part in PARTS if part.path.startswith("rules/ip") and "tables" in part.path)
_NFT, _IPVS, _CONNECTIONS = "rules/nft.txt", "rules/ipvs-stats.txt", ("net/conntrack-4.txt", "net/conntrack-6.txt")
_WANTED = (*_RULES, _NFT, _IPVS, SOCKETS_FILE)


def names_of(snapshot: Snapshot) -> Names:
    """Return the Service ports by address, protocol, and port of their frontends."""
    found: dict[tuple[str, str, int], str] = {}
    for service in snapshot.services.values():
        balancers = tuple(entry.ip for entry in service.ingress)
        for port in service.ports:
            name = f"{service.key}" + (f":{port.name}" if port.name else "")
            for address in (*service.cluster_ips, *service.external_ips, *balancers):
                found[address, port.protocol.lower, port.port] = name
            if port.node_port:
                found["", port.protocol.lower, port.node_port] = name
    return found


def look(names: Names, namespace: str | None = None) -> CounterReading:
    """Read the counters of this node, and the connection table only if there are none."""
    every = frozenset(part.path for part in PARTS) | {CNI_FILE, SOCKETS_FILE}
    parts = gather("", namespace, without=every - set(_WANTED)).parts
    return _counted(parts, names, lambda: gather("", namespace, without=every - set(_CONNECTIONS)).parts)


def look_at_bundle(path: Path, names: Names) -> CounterReading:
    """Read the counters of a bundle. Raises BundleError."""
    parts = read_bundle(path).parts
    return _counted(parts, names, lambda: parts)


def _counted(parts: Mapping[str, str], names: Names, more: Callable[[], Mapping[str, str]]) -> CounterReading:
    texts = [parts[path] for path in _RULES if path in parts]
    sockets = sockets_of(parts.get(SOCKETS_FILE), {})
    first = count(texts, parts.get(_NFT, ""), parts.get(_IPVS, ""), None, names, sockets)
    if first.counts:
        return first
    held = more()
    known = [held[path] for path in _CONNECTIONS if path in held]
    if not known:
        return first
    return count((), "", "", ConntrackListing("\n".join(known)).all, names)


class MigrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The report, and problems of the input."""

    migration: MigrationReport
    problems: tuple[str, ...] = ()


def prospect(cluster: ClusterObjects, before: str, after: str, chosen: NodeOptions) -> MigrationResult:
    """Return what changes if nodes change their mode; `chosen.node` limits it to one node. Raises InputError."""
    nodes = nodes_of(cluster, chosen)
    found: list[NodeChange] = []
    plans: list[Plan] = []
    problems: dict[str, None] = {}
    for name in nodes:
        one = node_inputs(cluster, msgspec.structs.replace(chosen, node=name, mode=before))
        other = node_inputs(cluster, msgspec.structs.replace(chosen, node=name, mode=after))
        problems |= dict.fromkeys((*one.problems, *other.problems))
        found += _on_one_node(one, other, plans)
    services = sorted({str(service) for plan in plans for service in plan.services})
    return MigrationResult(
        migration=MigrationReport(
            before=before,
            after=after,
            nodes=nodes,
            services=tuple(services),
            groups=grouped(found),
            differences=differences(BACKENDS[before].traits, BACKENDS[after].traits, plans),
        ),
        problems=tuple(problems),
    )


def nodes_of(cluster: ClusterObjects, chosen: NodeOptions) -> tuple[str, ...]:
    """Return the names of the nodes that the options choose. Raises InputError."""
    if chosen.node:
        return (chosen.node,)
    names = tuple(sorted(key.name for key in cluster.snapshot.nodes))
    if not names:
        raise InputError("which node? The manifests hold no Node; name one with --node")
    if chosen.node_ips and len(names) > 1:
        raise InputError(f"--node-ip is for one node: choose it with --node: {', '.join(names)}")
    return names


def _on_one_node(one: NodeInputs, other: NodeInputs, plans: list[Plan]) -> Iterator[NodeChange]:
    """Yield the changes on one node, and append its plans."""
    for family in one.families:
        first = serving(one.snapshot, family, _side(one))
        differing = list(factors(one.snapshot, family, _side(one), _side(other)))
        plans += (first.plan, *(factor.so_far.plan for factor in differing[-1:]))
        for change in compare(first, differing, one.host):
            yield NodeChange(node=one.config.node_name, family=family, change=change)


def _side(inputs: NodeInputs) -> ModeSetup:
    return ModeSetup(mode=inputs.mode, config=inputs.config, deviations=BACKENDS[inputs.mode].deviations)
