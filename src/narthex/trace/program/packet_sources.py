"""Rules and plans of nodes as sources of packets' outcomes, with the names of senders and frontends; reports about changes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from narthex.model import Host, IPFamily, Snapshot, family_of
from narthex.netfilter.dump.dump import GapKind
from narthex.netfilter.walk.losses import LossSigns
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.nftables.frame import POD_CIDRS
from narthex.proxy.plan.ir import Plan
from narthex.runtime.configuration.file import VERIFIED_MODES
from narthex.trace.follow.views import LinkAddress, NodeRules, NodeView
from narthex.trace.names import AddressNames
from narthex.trace.node.view import RulesByFamily
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.program.reports import SERVICE_LINKS, families_of_rules, mode_of_rules, nodes_of, obstacles
from narthex.trace.proof.changes import MOST_LINES, ChangeReport, change_report, undecided_change
from narthex.trace.proof.named_frontends import NamedFrontends
from narthex.trace.proof.packet_source import PacketSource
from narthex.trace.proof.sender_sets import SenderFacts
from narthex.trace.reports.senders import pod_networks

_UNKNOWN_ADDRESSES = (
    "the node's own addresses are unknown, so that rules which ask for them match loopback only: give --node-ip"
)


class RenderedRules(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of a mode for a node."""

    view: NodeView
    """The rules as they are read from `texts`."""
    texts: tuple[tuple[str, str], ...]
    """The rules of each IP family, with a name."""


def rendered_rules(inputs: NodeInputs) -> RenderedRules:
    """Return the rules that a mode renders for a node."""
    backend: Any = BACKENDS[inputs.mode]
    texts = tuple(
        (f"{inputs.mode} {family.label}", backend.text(backend.render(inputs.plan(family))))
        for family in inputs.families
    )
    view = NodeView(
        name=inputs.config.node_name,
        origin=f"mode {inputs.mode}",
        rules=RulesByFamily(texts),
        addresses=tuple(LinkAddress(ip, 128 if ":" in ip else 32, "eth0") for ip in inputs.host.addresses),
    )
    return RenderedRules(view=view, texts=texts)


def source_of_view(view: NodeView, family: IPFamily, own: Sequence[str] = ()) -> PacketSource:
    """Return the rules of a view. Its own addresses, or `own` where they are unknown, are those of the host."""
    held = view.rules.get(family) if view.rules is not None else None
    absent = [gap for gap in held.gaps if gap.kind is GapKind.TABLE] if held is not None else []
    held_here = view.own_addresses(SERVICE_LINKS) or own
    addresses = tuple(ip for ip in held_here if family_of(ip) is family)
    missing = [_UNKNOWN_ADDRESSES] if not addresses and held is not None and held.ruleset.tables else []
    handed_on = held is not None and (held.objects.servers or mode_of_rules(held, family) not in VERIFIED_MODES)
    if handed_on:
        missing.append(
            "IPVS or a relay forwards packets: `narthex check --prove` interprets that, this command doesn't"
        )
    return PacketSource(
        name=view.origin or view.words,
        family=family,
        host=Host(addresses=tuple(dict.fromkeys(addresses))),
        ruleset=None if held is None or handed_on else held.ruleset,
        obstacles=(*obstacles(view, family, GapKind.TABLE), *view.partial, *missing),
        given=tuple(f"{gap.text}, and has no rules" for gap in absent),
    )


def sender_facts(
    snapshot: Snapshot | None, plan: Plan | None, views: Sequence[NodeView], family: IPFamily
) -> SenderFacts:
    """Return what objects, a plan, and views tell about senders."""
    networks: dict[str, None] = {}
    for view in views:
        networks |= dict.fromkeys(pod_networks(view, family))
        held = view.rules.get(family) if view.rules is not None else None
        for table in held.ruleset.tables if held is not None else ():
            networks |= dict.fromkeys(sorted(LossSigns(table).pod_networks()))
            own_set = table.sets.get(POD_CIDRS) if table.name.startswith("narthex") else None
            networks |= dict.fromkeys(str(key[0]) for key in own_set.elements) if own_set is not None else {}
    if snapshot is None:
        return SenderFacts(pods=tuple(networks))
    nodes = snapshot.nodes.values()
    by_node = {node.name: node.pod_cidrs for node in nodes}
    pods = plan.pods if plan is not None else None
    return SenderFacts(
        pods=(
            *networks,
            *(pods.cidrs if pods is not None else ()),
            *(cidr for each in by_node.values() for cidr in each),
        ),
        pod_links=tuple(filter(None, (pods.interface, pods.interface_prefix and f"{pods.interface_prefix}*")))
        if pods
        else (),
        pods_by_node=by_node,
        nodes={node.name: (*node.internal_ips, *node.external_ips) for node in nodes},
        name_of=AddressNames(snapshot).of,
    )


def add_frontends(
    found: NamedFrontends, plan: Plan | None, rules: Sequence[NodeRules], host: Host, family: IPFamily
) -> None:
    """Add the frontends of a plan and of rules; those of the plan keep their names."""
    if plan is not None:
        found.add_plan(plan)
    for each in rules:
        found.add_rules(each, family, host.addresses)


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Switch off the garbage collector: sets of packets form no cycles, and collections would take as long as the walk."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def changes_between(
    before: NodeView, after: NodeView, inputs: NodeInputs | None, own: Sequence[str] = (), most: int | None = MOST_LINES
) -> tuple[ChangeReport, ...]:
    """Return what changes from the rules of one view to those of another, for each IP family of which both have rules.

    Args:
        before: A view with rules.
        after: The other view.
        inputs: Objects that give names; None if there are none.
        own: The node's own addresses; default: those of the view that has some.
        most: The number of lines for each report; None for all.
    """
    own = own or before.own_addresses(SERVICE_LINKS) or after.own_addresses(SERVICE_LINKS)
    node = before.node or (inputs.config.node_name if inputs is not None else "")
    found = []
    for family in families_of_rules((before, after)):
        one, other = (source_of_view(view, family, own) for view in (before, after))
        if not (one.decides and other.decides):
            found.append(undecided_change(node, one, other))
            continue
        plan = inputs.plan(family) if inputs is not None and family in inputs.families else None
        facts = sender_facts(inputs.snapshot if inputs is not None else None, plan, (before, after), family)
        rules = [view.rules[family] for view in (before, after) if view.rules is not None]
        name_frontends = partial(add_frontends, plan=plan, rules=rules, host=one.host, family=family)
        with without_collections():
            found.append(change_report(node, one, other, facts, name_frontends, most))
    return tuple(found)


def changes_of_modes(
    cluster: ClusterObjects, before: str, after: str, chosen: NodeOptions, most: int | None = MOST_LINES
) -> tuple[tuple[ChangeReport, ...], tuple[str, ...]]:
    """Return what changes if nodes change their mode, and problems of the input. Raises InputError."""
    found: list[ChangeReport] = []
    problems: dict[str, None] = {}
    for name in nodes_of(cluster, chosen):
        one, other = (
            node_inputs(cluster, msgspec.structs.replace(chosen, node=name, mode=mode)) for mode in (before, after)
        )
        problems |= dict.fromkeys((*one.problems, *other.problems))
        before_view, after_view = (rendered_rules(each).view for each in (one, other))
        found += changes_between(before_view, after_view, one, one.host.addresses, most)
    return tuple(found), tuple(problems)
