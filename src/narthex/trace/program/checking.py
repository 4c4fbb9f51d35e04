"""`narthex check`: the objects of one node's cluster against what is known of its kernel."""

from __future__ import annotations

from narthex.model.net import contains, family_of
from narthex.proxy.program.inputs import Cluster, Wishes
from narthex.proxy.program.inputs import view as node_view
from narthex.trace.follow.views import NodeView
from narthex.trace.reports.check import CheckReport, check


def compare(cluster: Cluster, view: NodeView, wishes: Wishes) -> tuple[tuple[CheckReport, ...], tuple[str, ...]]:
    """A report for each family, and what is wrong with the objects. Raises InputError."""
    own = tuple(
        each.address
        for each in view.addresses or ()
        if each.scope != "link"
        and not contains(family_of(each.address).loopback, each.address)
        and not _bound(each.link)
    )
    name = wishes.node or (view.name if _is_node(cluster, view.name) else "")
    chosen = Wishes(
        node=name,
        mode=wishes.mode,
        config_file=wishes.config_file,
        cluster_cidr=wishes.cluster_cidr,
        node_ips=wishes.node_ips,
    )
    inputs = node_view(cluster, chosen)
    first = [ip for ip in inputs.host.addresses if ip in own or not own]
    addresses = (*first, *(ip for ip in own if ip not in first))
    reports = tuple(
        check(inputs.plan(family), view, tuple(ip for ip in addresses if family_of(ip) is family))
        for family in inputs.families
    )
    return reports, inputs.problems


def _is_node(cluster: Cluster, name: str) -> bool:
    return any(key.name == name for key in cluster.snapshot.nodes)


def _bound(link: str) -> bool:
    """Whether a link holds the addresses of Services."""
    return link in ("kube-ipvs0", "nodelocaldns")


def status(reports: tuple[CheckReport, ...]) -> int:
    """0: the same; 1: differences; 2: it cannot be told."""
    every = {report.status for report in reports}
    return 1 if 1 in every else 2 if 2 in every or not every else 0
