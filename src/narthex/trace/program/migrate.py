"""Effects of a change of mode on all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.ir import Plan
from narthex.trace.program.inputs import ClusterObjects, InputError, NodeInputs, NodeOptions, node_inputs
from narthex.trace.reports.compare import ModeSetup, compare, factors, serving
from narthex.trace.reports.migration import MigrationReport, NodeChange, differences, grouped


class MigrationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The report, and problems of the input."""

    migration: MigrationReport
    problems: tuple[str, ...] = ()


def prospect(cluster: ClusterObjects, before: str, after: str, chosen: NodeOptions) -> MigrationResult:
    """Return what changes if nodes change their mode; `chosen.node` limits it to one node. Raises InputError."""
    nodes = _nodes(cluster, chosen)
    found: list[NodeChange] = []
    plans: list[Plan] = []
    problems: dict[str, None] = {}
    for name in nodes:
        one, other = (
            node_inputs(cluster, msgspec.structs.replace(chosen, node=name, mode=mode)) for mode in (before, after)
        )
        problems |= dict.fromkeys((*one.problems, *other.problems))
        found += _on_one_node(one, other, plans)
    services = sorted({str(service) for plan in plans for service in plan.services})
    return MigrationResult(
        migration=MigrationReport(
            before=before,
            after=after,
            nodes=nodes,
            services=tuple(services),
            groups=grouped(found),
            differences=differences(BACKENDS[before].traits, BACKENDS[after].traits, plans),
        ),
        problems=tuple(problems),
    )


def _nodes(cluster: ClusterObjects, chosen: NodeOptions) -> tuple[str, ...]:
    if chosen.node:
        return (chosen.node,)
    names = tuple(sorted(key.name for key in cluster.snapshot.nodes))
    if not names:
        raise InputError("which node? The manifests hold no Node; name one with --node")
    if chosen.node_ips and len(names) > 1:
        raise InputError(f"--node-ip is for one node: choose it with --node: {', '.join(names)}")
    return names


def _on_one_node(one: NodeInputs, other: NodeInputs, plans: list[Plan]) -> Iterator[NodeChange]:
    """Yield the changes on one node, and append its plans."""
    for family in one.families:
        first = serving(one.snapshot, family, _side(one))
        differing = list(factors(one.snapshot, family, _side(one), _side(other)))
        plans += (first.plan, *(factor.so_far.plan for factor in differing[-1:]))
        for change in compare(first, differing, one.host):
            yield NodeChange(node=one.config.node_name, family=family, change=change)


def _side(inputs: NodeInputs) -> ModeSetup:
    return ModeSetup(mode=inputs.mode, config=inputs.config, deviations=BACKENDS[inputs.mode].deviations)
