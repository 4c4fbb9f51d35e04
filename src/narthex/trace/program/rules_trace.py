"""The path of one packet by plan and rules of one node: from a `ResolvedRequest` to a `PacketPath`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.model import Host, IPFamily, Snapshot, family_of
from narthex.netfilter.dump.read import WalkInput
from narthex.netfilter.walk.walk import walk
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.causes.find import find
from narthex.trace.evaluate import evaluate
from narthex.trace.explain import PlanCase, annotate, explain
from narthex.trace.model import PacketPath
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.program.inputs import NodeInputs
from narthex.trace.program.places import (
    CLUSTER_DOMAIN,
    OUTSIDE_NAMES,
    OwnerIndex,
    ResolvedRequest,
    TraceError,
    ask,
    question,
)

if TYPE_CHECKING:
    from narthex.lb.election import NodeAnnouncerState


def _relay_table(dump: WalkInput, family: IPFamily) -> Any:
    """Return the relay's listeners from the comments of a dump."""
    from narthex.proxy.backends.userspace.rules import table_of

    try:
        return table_of(dump.comments, family)
    except ValueError as error:
        raise TraceError(str(error)) from error


class TracedPath(msgspec.Struct, frozen=True, kw_only=True):
    """A packet's path, and why it fails."""

    path: PacketPath
    findings: list[CauseFinding]


def trace_by_objects(
    snapshot: Snapshot,
    sender: str,
    destination: str,
    inputs_of: Callable[[str], NodeInputs],
    *,
    domain: str = CLUSTER_DOMAIN,
    iif: str | None = None,
    dump: Callable[[IPFamily], WalkInput] | None = None,
) -> TracedPath:
    """Trace a packet by the rules that the objects become on one node. The nodes are not asked. Raises InputError.

    Args:
        snapshot: The objects.
        sender: Who sends, as the user names it.
        destination: Where to, as the user names it.
        inputs_of: Returns the view of a node by its name: that of the sender, or of the target; empty if both are on none.
        domain: The cluster domain.
        iif: The interface that the packet comes in on; None selects one that fits the sender.
        dump: Rules from the output of the node's tools, instead of those that the objects become.
    """
    places = OwnerIndex(snapshot)
    source, target, spec = ask(places, sender, destination, domain)
    inputs = inputs_of(source.node or target.node)
    asked = question(places, source, target, spec, inputs, inputs.host, iif)
    path = answer(asked, inputs, inputs.host, others=OUTSIDE_NAMES, dump=dump)
    return TracedPath(path=path, findings=find(path, {}, snapshot))


def answer(
    asked: ResolvedRequest,
    inputs: NodeInputs,
    host: Host,
    *,
    others: dict[str, AddressName] | None = None,
    live_rules: Callable[[IPFamily], Any] | None = None,
    dump: Callable[[IPFamily], WalkInput] | None = None,
    live_route: Callable[[str], str] | None = None,
    announcers: Mapping[str, NodeAnnouncerState] | None = None,
    path: PacketPath | None = None,
) -> PacketPath:
    """Return the packet's path, annotated with the plan.

    Args:
        asked: The packet.
        inputs: The node's view of the cluster.
        host: The node's addresses.
        others: Names of addresses that no object owns.
        live_rules: Reads the rules of a running node, instead of those that the plan would become.
        dump: Rules from the output of the node's tools, instead of those that the plan would become.
        live_route: Returns the node's own route to an address, instead of what Node objects imply.
        announcers: The load balancer announcer of each node; None if each node is assumed to run one.
        path: The path over all nodes if it has been followed already; otherwise the rules of this node are walked.

    Raises TraceError.
    """
    case = _case(asked, inputs, host, live_rules, dump)
    names = AddressNames(inputs.snapshot, others)
    route = live_route or (lambda ip: names.route(ip, inputs.config.node_name))
    path = explain(case, names, route) if path is None else annotate(path, case, route)
    if asked.source.kind not in ("outside", "address") or asked.packet.from_host:
        return path
    return msgspec.structs.replace(path, announced=_announced(inputs, asked.packet.destination, announcers))


def _case(
    asked: ResolvedRequest,
    inputs: NodeInputs,
    host: Host,
    live_rules: Callable[[IPFamily], Any] | None,
    dump: Callable[[IPFamily], WalkInput] | None,
) -> PlanCase:
    """Return the predictions of both plan and rules. Raises TraceError."""
    from narthex.proxy.backends import BACKENDS
    from narthex.proxy.backends.userspace.backend import UserspaceBackend

    backend = BACKENDS[inputs.mode]
    packet = asked.packet
    family = family_of(packet.destination)
    plan = inputs.plan(family)
    held = dump(family) if dump is not None else None
    if held is not None:
        walked, whence = walk(held.copied, packet, host, objects=held.objects), "read from dumps"
        if isinstance(backend, UserspaceBackend):
            walked = backend.onwards(walked, _relay_table(held, family))
    else:
        rules = live_rules(family) if live_rules else backend.render(plan)
        if rules is None:
            raise TraceError(f"the node has no rules of mode {inputs.mode} for {family.label}")
        walked = backend.walk(rules, packet, host)
        whence = "read from the node" if live_rules else "rendered from the plan"
    return PlanCase(
        plan=plan,
        packet=packet,
        host=host,
        mode=inputs.mode,
        planned=evaluate(plan, packet, host, backend.deviations),
        walked=walked,
        rules=whence,
        deviations=backend.deviations,
        lookup=asked.destination.lookup,
        held=held,
    )


def _announced(inputs: NodeInputs, address: str, known: Mapping[str, NodeAnnouncerState] | None) -> tuple[str, ...]:
    """Return which node announces a load balancer's address, and why; empty for other addresses."""
    from narthex.lb.election import ElectionInput, NodeAnnouncerState, elect

    if not inputs.snapshot.address_pools:
        return ()
    nodes = known or {key.name: NodeAnnouncerState() for key in inputs.snapshot.nodes}
    decision = elect(ElectionInput(snapshot=inputs.snapshot, announcers=nodes)).get(address)
    if decision is None:
        return ()
    here, said = inputs.config.node_name, f"{decision.holder} answers for {address}"
    if not decision.holder:
        said = f"no node answers for {address}, so no packet arrives"
    elif decision.holder != here:
        said += f", so packets come to {decision.holder} and not to {here}"
    return (said, *(f"{each.node}: {each.reason.value}: {each.text}" for each in decision.verdicts), *decision.notes)
