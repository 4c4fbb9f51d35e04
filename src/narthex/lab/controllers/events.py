"""What controllers tell people about an object: Events (core/v1)."""

from __future__ import annotations

from datetime import datetime

from narthex.lab.controllers.objects import key_of, letters, stamp, uid_of
from narthex.lab.controllers.view import Create, Object


def event(about: Object, reason: str, message: str, now: datetime, *, source: str, warning: bool = False) -> Create:
    """An Event about an object as it is now."""
    key = key_of(about)
    # Events about what has no namespace are in this one.
    namespace = key.namespace or "default"
    moment = stamp(now)
    version = about["metadata"].get("resourceVersion") or ""
    # Upstream's ends are nanoseconds in hexadecimal digits; ours follow from what is said.
    name = f"{key.name[:230]}.{letters(f'{uid_of(about)} {version} {reason} {message} {now.isoformat()}', 16)}"
    return Create(
        "Event",
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                **({"namespace": key.namespace} if key.namespace else {}),
                "name": key.name,
                "uid": uid_of(about),
                "resourceVersion": version,
            },
            "reason": reason,
            "message": message[:1024],
            "type": "Warning" if warning else "Normal",
            "count": 1,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "source": {"component": source},
            "reportingComponent": source,
            "reportingInstance": "",
        },
    )
