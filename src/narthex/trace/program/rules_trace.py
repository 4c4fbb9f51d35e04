"""The path of one packet by plan and rules of one node: from what a person typed to a `PacketPath`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from narthex.model.net import IPFamily, Protocol, contains, family_of
from narthex.model.packet import Host, Packet
from narthex.netfilter.dump.read import WalkInput
from narthex.netfilter.walk.walk import walk
from narthex.trace.evaluate import evaluate
from narthex.trace.explain import PlanCase, annotate, explain
from narthex.trace.model import PacketPath
from narthex.trace.names import AddressName, AddressNames
from narthex.trace.program.inputs import NodeInputs
from narthex.trace.program.places import (
    AddressOwner,
    DestinationSpec,
    OwnerIndex,
    TraceError,
    as_address,
    by_name,
    split_destination,
)

if TYPE_CHECKING:
    from narthex.lb.announce import NodeAnnouncerState

CLUSTER_DOMAIN = "cluster.local"
"""The default cluster domain."""

_DEFAULT_BRIDGE = "cni0"


class ResolvedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The packet to trace, and its two ends."""

    packet: Packet
    source: AddressOwner
    destination: AddressOwner


def ask(
    places: OwnerIndex, sender: str, destination: str, domain: str = CLUSTER_DOMAIN
) -> tuple[AddressOwner, AddressOwner, DestinationSpec]:
    """Find both ends; `domain` is the cluster domain. Raises TraceError."""
    spec = split_destination(destination)
    source = places.sender(sender)
    if "." in spec.name and as_address(spec.name) is None and not places.knows(spec.name):
        return source, by_name(places, source, spec.name, domain), spec
    return source, places.destination(spec.name), spec


def question(
    places: OwnerIndex,
    source: AddressOwner,
    target: AddressOwner,
    spec: DestinationSpec,
    inputs: NodeInputs,
    host: Host,
    iif: str | None,
) -> ResolvedRequest:
    """Return the packet to trace. `iif` None stands for an interface that fits the sender. Raises TraceError."""
    sent_from, to, port, protocol = flow_of(places, source, target, spec)
    family = family_of(to)
    own = sent_from in host.addresses or contains(family.loopback, sent_from)
    arrives = "" if own else _arrival(inputs, source, sent_from) if iif is None else iif
    packet = Packet(source=sent_from, destination=to, port=port, protocol=protocol, iif=arrives, from_host=own)
    return ResolvedRequest(packet=packet, source=source, destination=target)


def flow_of(
    places: OwnerIndex, source: AddressOwner, target: AddressOwner, spec: DestinationSpec
) -> tuple[str, str, int, Protocol]:
    """Return source, destination, port, and protocol, in the first IP family that both ends have. Raises TraceError."""
    to = next((ip for ip in target.addresses if any(family_of(own) is family_of(ip) for own in source.addresses)), None)
    if to is None:
        raise TraceError(f"{source.name} and {target.name} have no IP family in common")
    port, protocol = port_of(places, target, to, spec)
    return next(ip for ip in source.addresses if family_of(ip) is family_of(to)), to, port, protocol


def port_of(places: OwnerIndex, target: AddressOwner, to: str, spec: DestinationSpec) -> tuple[int, Protocol]:
    """Return port and protocol: those given, or those of the Service's port by name or its only one. Raises TraceError."""
    if spec.protocol is Protocol.ICMP:
        return 0, Protocol.ICMP
    service = target.service or places.of(to)
    ports = [each for each in (service.ports if service else ()) if spec.protocol in (None, each.protocol)]
    if spec.port.isascii() and spec.port.isdigit():
        number = int(spec.port)
        if not 0 < number < 65536:
            raise TraceError(f"{number} is not a port (1-65535)")
        same = [each.protocol for each in ports if each.port == number]
        return number, spec.protocol or (Protocol.TCP if Protocol.TCP in same or not same else same[0])
    fitting = [each for each in ports if not spec.port or each.name == spec.port]
    if len(fitting) == 1:
        return fitting[0].port, fitting[0].protocol
    choices = ", ".join(
        f"{each.port}/{each.protocol.lower}" + (f" ({each.name})" if each.name else "") for each in ports
    )
    if spec.port:
        raise TraceError(f"{spec.port!r} is no port of {target.name}" + (f"; there are {choices}" if choices else ""))
    raise TraceError(
        f"which port of {target.name}? " + (f"There are {choices}" if choices else "Write it as NAME:PORT")
    )


def _arrival(inputs: NodeInputs, source: AddressOwner, sent_from: str) -> str:
    """Return the input interface for this sender, as pod detection expects it."""
    config = inputs.config
    here = any(contains(cidr, sent_from) for cidr in inputs.node.pod_cidrs)
    if not here and (source.kind != "pod" or source.node != config.node_name):
        return "eth0"
    if config.detect_local_mode == "InterfaceNamePrefix" and config.interface_name_prefix:
        return f"{config.interface_name_prefix}0"
    return config.bridge_interface or _DEFAULT_BRIDGE


def _relay_table(dump: WalkInput, family: IPFamily) -> Any:
    """Return the relay's listeners from the comments of a dump."""
    from narthex.proxy.backends.userspace.rules import table_of

    try:
        return table_of(dump.comments, family)
    except ValueError as error:
        raise TraceError(str(error)) from error


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
    from narthex.lb.announce import ElectionInput, NodeAnnouncerState, elect

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
