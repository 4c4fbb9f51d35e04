"""`narthex check`: a cluster's objects against what is known of one node's kernel."""

from __future__ import annotations

import msgspec

from narthex.model.net import contains, family_of
from narthex.trace.follow.views import NodeView
from narthex.trace.program.inputs import ClusterObjects, NodeInputs, NodeOptions, node_inputs
from narthex.trace.reports.check import CheckReport, check

_SERVICE_LINKS = ("kube-ipvs0", "nodelocaldns")
"""Links that hold addresses of Services."""


def compare(
    cluster: ClusterObjects, view: NodeView, options: NodeOptions
) -> tuple[tuple[CheckReport, ...], tuple[str, ...]]:
    """Return a report for each IP family, and problems of the objects. Raises InputError."""
    known = any(key.name == view.name for key in cluster.snapshot.nodes)
    name = options.node or (view.name if known else "")
    inputs = node_inputs(cluster, msgspec.structs.replace(options, node=name))
    return compare_node(inputs, view), inputs.problems


def compare_node(inputs: NodeInputs, view: NodeView) -> tuple[CheckReport, ...]:
    """Return a report for each IP family about one node."""
    own = tuple(
        each.address
        for each in view.addresses or ()
        if each.scope != "link"
        and not contains(family_of(each.address).loopback, each.address)
        and each.link not in _SERVICE_LINKS
    )
    first = [ip for ip in inputs.host.addresses if ip in own or not own]
    addresses = (*first, *(ip for ip in own if ip not in first))
    return tuple(
        check(inputs.plan(family), view, tuple(ip for ip in addresses if family_of(ip) is family))
        for family in inputs.families
    )


def status(reports: tuple[CheckReport, ...]) -> int:
    """Return the exit status: 0 without differences, 1 with differences, 2 if it can't be decided."""
    every = {report.status for report in reports}
    return 1 if 1 in every else 2 if 2 in every or not every else 0
