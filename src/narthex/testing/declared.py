"""What a scenario demands of a mode: its expectations, less what the mode's backend declares it cannot do as asked.

Only deviations that touch every flow alike are here. Where a single packet fares otherwise in some mode, the scenario
says so itself, with a flow of that mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from narthex.model.net import Protocol
from narthex.model.packet import Disposition
from narthex.proxy.plan.ir import Deviation
from narthex.testing.findings import End
from narthex.testing.scenario import ScenarioFlow


def as_declared(flows: Iterable[ScenarioFlow], deviations: Set[Deviation]) -> tuple[ScenarioFlow, ...]:
    """The flows with the ends that a backend with these deviations has to give."""
    return tuple(
        msgspec.structs.replace(flow, expect=frozenset(_end(end, flow.protocol, deviations) for end in flow.expect))
        for flow in flows
    )


def _end(end: End, protocol: Protocol, deviations: Set[Deviation]) -> End:
    what, place, rewritten = end
    if what is not Disposition.DELIVERED:
        return end
    if Deviation.NO_SCTP in deviations and protocol is Protocol.SCTP:
        return Disposition.REJECTED, None, False
    return what, place, rewritten or Deviation.RELAYED in deviations
