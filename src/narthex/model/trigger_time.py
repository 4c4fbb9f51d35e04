"""When the change happened that an EndpointSlice reports, by the annotation of the controller that writes slices."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from narthex.model.objects import EndpointSlice

TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"
"""The annotation: when the pod or Service changed for which the slice was last written."""

_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", re.ASCII)


def trigger_time(one: EndpointSlice) -> float | None:
    """Return the annotation's time in seconds since the epoch, or None if it is absent or not a time of RFC 3339."""
    text = one.annotation(TRIGGER_TIME)
    match = _TIME.fullmatch(text) if text else None
    if match is None:
        return None
    try:
        whole = datetime.fromisoformat(match[1] + (match[3] if match[3] != "Z" else "+00:00"))
    except ValueError:
        return None
    return (whole + timedelta(seconds=float(f"0.{match[2] or 0}"))).timestamp()
