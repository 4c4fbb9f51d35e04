"""All causes that a path shows, the first cause first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from narthex.model import Snapshot
from narthex.trace.causes.answers import of_answers
from narthex.trace.causes.catalogue import CAUSES, CauseFinding
from narthex.trace.causes.drops import of_drops
from narthex.trace.causes.impairments import of_impairments
from narthex.trace.causes.memory import of_memory
from narthex.trace.causes.objects import of_objects
from narthex.trace.causes.partial import of_partial, of_refusals
from narthex.trace.causes.proxies import of_proxies
from narthex.trace.causes.routes import of_routes
from narthex.trace.causes.scene import DiagnosisContext
from narthex.trace.follow.views import Impairment, NodeView
from narthex.trace.model import PacketPath

_ORDER = {name: number for number, name in enumerate(CAUSES)}
_KINDS = (of_objects, of_proxies, of_drops, of_routes, of_memory, of_answers, of_partial, of_refusals)


def find(
    path: PacketPath,
    views: Mapping[str, NodeView],
    cluster: Snapshot | None = None,
    impairments: Sequence[Impairment] = (),
) -> list[CauseFinding]:
    """Return what is wrong with a path; nothing for a healthy path.

    Causes of the failure come before others, certain ones before likely ones, then in the order in which a packet meets them.
    `views` are by node name. With partial input no cause is certain.
    """
    scene = DiagnosisContext(path, views, cluster, impairments)
    found: dict[tuple[str, str], CauseFinding] = {}
    for kind in _KINDS:
        for each in kind(scene):
            one = msgspec.structs.replace(each, certain=False) if scene.partial and each.certain else each
            found.setdefault((one.cause.id, one.node), one)
        scene.explained = any(each.explains for each in found.values())
    for each in of_impairments(scene, [each.cause.id for each in found.values() if each.explains]):
        found.setdefault((each.cause.id, each.sentence), each)
    return sorted(found.values(), key=lambda each: (not each.explains, not each.certain, _ORDER[each.cause.id]))
