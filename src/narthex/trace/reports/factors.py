"""In what two modes differ on a node: setting by setting, deviation by deviation."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narthex.model.net import IPFamily
from narthex.model.store import Snapshot
from narthex.proxy.plan.ir import Deviation
from narthex.proxy.plan.planner import NodeConfig, plan_once
from narthex.trace.reports.compare import Factor, ServingState


class ModeSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A mode on one node."""

    mode: str
    config: NodeConfig
    """With the mode's defaults filled in."""
    deviations: frozenset[Deviation]


def serving(snapshot: Snapshot, family: IPFamily, side: ModeSetup) -> ServingState:
    """How a mode serves one family."""
    return ServingState(plan=plan_once(snapshot, side.config, family), deviations=side.deviations)


def factors(snapshot: Snapshot, family: IPFamily, before: ModeSetup, after: ModeSetup) -> Iterator[Factor]:
    """What makes `after` of `before`, one by one; nothing when they are the same."""
    first = so_far = serving(snapshot, family, before)
    config = before.config
    for field in NodeConfig.__struct_fields__:
        one, other = getattr(before.config, field), getattr(after.config, field)
        if one == other:
            continue
        config = msgspec.structs.replace(config, **{field: other})
        alone = msgspec.structs.replace(before.config, **{field: other})
        so_far = msgspec.structs.replace(so_far, plan=plan_once(snapshot, config, family))
        yield Factor(
            reason=f"{_camel(field)} is {_value(one)} in {before.mode} mode, {_value(other)} in {after.mode} mode",
            alone=msgspec.structs.replace(first, plan=plan_once(snapshot, alone, family)),
            so_far=so_far,
        )
    for side, own in ((before, before.deviations - after.deviations), (after, after.deviations - before.deviations)):
        for deviation in sorted(own, key=lambda each: each.value):
            so_far = msgspec.structs.replace(so_far, deviations=so_far.deviations ^ {deviation})
            yield Factor(
                reason=f"in {side.mode} mode {deviation.words}",
                alone=msgspec.structs.replace(first, deviations=first.deviations ^ {deviation}),
                so_far=so_far,
            )


def _camel(field: str) -> str:
    """The setting as the configuration file writes it."""
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _value(value: object) -> str:
    """A setting's value for people."""
    if value is None:
        return "every address"
    if isinstance(value, bool):
        return "on" if value else "off"
    return (", ".join(map(str, value)) if isinstance(value, tuple) else str(value)) or "empty"
