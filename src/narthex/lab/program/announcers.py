"""What the announcers of a running lab say: why a Service's addresses are answered for, and by which node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narthex.lab.program.labs import Lab, access_of, open_lab
from narthex.lab.program.node_client import announcer_status
from narthex.lab.program.state import LabError
from narthex.lb.program.inspection import States, WhyError, read_status, why_service
from narthex.lb.why import ServiceExplanation


def states(lab: Lab) -> dict[str, Mapping[str, Any]]:
    """What each announcer says that answers, by node."""
    told = {node.name: read_status(announcer_status(node.namespace)) for node in lab.nodes}
    return {name: state for name, state in told.items() if state is not None}


def holder(told: States, address: str) -> str:
    """The node that answers for an address now; empty when none does."""
    return next(
        (
            node
            for node, state in told.items()
            if any(each["address"] == address and each["answers"] for each in state["addresses"])
        ),
        "",
    )


def why_lab(name: str, service: str) -> ServiceExplanation:
    """Why a Service's addresses are answered for in a running lab, or not. Raises WhyError."""
    try:
        lab = open_lab(name)
    except LabError as error:
        raise WhyError(str(error)) from error
    return why_service(service, access=access_of(lab), states=states(lab))
