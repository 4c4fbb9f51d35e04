"""The expectations of a scenario for a mode, adapted to the deviations that the mode's backend declares.

This covers only deviations that affect every flow in the same way. Where a mode treats a single packet differently, the
scenario has a flow for that mode.
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
    """Return the flows with the outcomes that a backend with these deviations must produce."""
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
