"""Load balancer announcers of a running lab: which node answers for an address, and why."""

from __future__ import annotations

from narthex.lab.program.labs import access_of, open_lab
from narthex.lab.program.node_client import announcer_status
from narthex.lab.program.state import LabError, LabState
from narthex.lb.program.inspection import States, WhyError, why_service
from narthex.lb.why import AnnouncerStatus, ServiceExplanation


def states(lab: LabState) -> dict[str, AnnouncerStatus]:
    """Return the status of each announcer that responds, by node."""
    found = {node.name: announcer_status(node.namespace) for node in lab.nodes}
    return {name: state for name, state in found.items() if state is not None}


def answering(states: States) -> dict[str, tuple[str, ...]]:
    """Return the nodes that answer for each address. Nodes that are cut off from each other may both do."""
    found: dict[str, tuple[str, ...]] = {}
    for node, state in states.items():
        for each in state.addresses:
            found[each.address] = (*found.get(each.address, ()), *((node,) if each.answers else ()))
    return found


def why_lab(name: str, service: str) -> ServiceExplanation:
    """Explain which node answers for each address of a Service in a running lab, and why. Raises WhyError."""
    try:
        lab = open_lab(name)
    except LabError as error:
        raise WhyError(str(error)) from error
    return why_service(service, access=access_of(lab), states=states(lab))
