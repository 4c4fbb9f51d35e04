"""A packet's way for the page: where it begins, which Service it meets, where it ends and how likely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narthex.model.store import Snapshot
from narthex.proxy.program.inputs import Cluster, InputError, Wishes, view
from narthex.trace.explain import Explanation
from narthex.trace.names import Named
from narthex.trace.program.places import OUTSIDE, Places, TraceError
from narthex.trace.program.rules_trace import answer, ask, question
from narthex.trace.render.tree import text

Tracer = Callable[[str, str], Explanation]
"""Source and destination, as `narthex trace` takes them. Raises TraceError or InputError."""


def planned(snapshot: Snapshot, source: str, destination: str, mode: str = "") -> Explanation:
    """The way by rules as they would be made of the objects: a cluster's nodes are not asked. Raises TraceError, InputError."""
    places = Places(snapshot)
    sender, target, wanted = ask(places, source, destination)
    node = sender.node or target.node or next(iter(sorted(key.name for key in snapshot.nodes)), "")
    inputs = view(Cluster(snapshot=snapshot), Wishes(node=node, mode=mode))
    asked = question(places, sender, target, wanted, inputs, inputs.host, None)
    return answer(asked, inputs, inputs.host, others={ip: Named("outside", "") for ip in OUTSIDE})


def path(trace: Tracer, snapshot: Snapshot, source: str, destination: str) -> dict[str, Any]:
    """The way as JSON can hold it; `error` alone when the question cannot be asked so."""
    try:
        found = trace(source, destination)
    except (TraceError, InputError) as error:
        return {"error": str(error)}
    places = Places(snapshot)

    def key_at(endpoint: str | None) -> str:
        """The pod or node of an endpoint."""
        address = (endpoint or "").rpartition(":")[0].strip("[]")
        place = places.at(address)
        return place.name if place else ""

    return {
        "packet": found.packet,
        "node": found.node,
        "rules": found.rules,
        "service": found.service.rpartition(":")[0] if found.service and ":" in found.service else found.service or "",
        "agree": found.agree,
        "text": text(found),
        "ends": [
            {
                "probability": end.probability,
                "fraction": end.fraction,
                "disposition": end.disposition,
                "endpoint": end.endpoint or "",
                "key": key_at(end.endpoint),
                "masquerade": end.masquerade,
                "note": end.note,
            }
            for end in found.ends
        ],
    }
