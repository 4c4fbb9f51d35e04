"""One packet of our own sent the way of a journey, and the kernel's account of it laid beside the prediction."""

from __future__ import annotations

import msgspec

from narthex.linux import namespaces as netns
from narthex.linux.addresses import own_addresses
from narthex.model.net import Protocol, contains, family_of
from narthex.trace.document import ProbeRecord
from narthex.trace.follow import align
from narthex.trace.follow.align import Alignment
from narthex.trace.model import PacketPath
from narthex.trace.program.kernel_probe import DEADLINE, KernelProbe, KernelProbeError, ProbeOutcome, probe
from narthex.trace.program.places import TraceError


class ProbeComparison(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent, what came of it, and how it compares."""

    probed: ProbeOutcome
    alignment: Alignment


def send(
    journey: PacketPath, *, sender: str | None, node: str | None, node_name: str = "", deadline: float = DEADLINE
) -> ProbeComparison:
    """Send the journey's packet. `sender` and `node` are named network namespaces, None the present one; `node_name` says
    whose part of the journey is compared. Raises TraceError."""
    packet = journey.packet
    asked = KernelProbe(
        source=packet.source,
        destination=packet.destination,
        port=packet.port,
        protocol=Protocol(packet.protocol.upper()),
        sender=sender,
        node=node,
    )
    try:
        probed = probe(asked, deadline)
    except KernelProbeError as error:
        raise TraceError(f"the probe: {error}") from error
    return ProbeComparison(probed=probed, alignment=align.align(journey, probed.trace, node_name))


def sender_of(address: str, node: str | None) -> str | None:
    """The named network namespace that has an address; `node` is the node's own. Raises TraceError."""
    if contains(family_of(address).loopback, address):
        return node
    for name in (node, *(each for each in netns.names() if each != node)):
        try:
            with netns.entered(name):
                if any(each.address == address for each in own_addresses()):
                    return name
        except OSError:
            continue  # it has gone meanwhile
    raise TraceError(
        f"the probe: no network namespace of this machine has {address}, so the packet cannot be sent from here; pods of "
        "this node and the node itself can be senders"
    )


def text(tried: ProbeComparison) -> str:
    """For people, ending with a newline."""
    answer = {"nothing": "nothing came back", "connected": "it was accepted"}.get(
        tried.probed.answer, tried.probed.answer
    )
    head = f"probe: {tried.probed.flow}: {answer}; the kernel tells:\n"
    return head + align.text(tried.alignment)


def record(tried: ProbeComparison) -> ProbeRecord:
    """Return the result as part of a document."""
    return ProbeRecord(flow=tried.probed.flow, answer=tried.probed.answer, **msgspec.structs.asdict(tried.alignment))
