"""Spans of time as kubectl shows them (apimachinery's util/duration.HumanDuration)."""

from __future__ import annotations

from datetime import datetime


def age(since: str | None, now: datetime) -> str:
    """How long ago a metav1.Time was, `<unknown>` when there is none."""
    if not since:
        return "<unknown>"
    try:
        then = datetime.fromisoformat(since.replace("Z", "+00:00"))
    except ValueError:
        return "<invalid>"
    return human((now - then).total_seconds())


def human(seconds: float) -> str:
    """A span in the one or two units that matter."""
    if seconds < -1:
        return "<invalid>"
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return _two(minutes, "m", whole % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if days < 365 * 2:
        return f"{days}d"
    if days < 365 * 8:
        return _two(days // 365, "y", days % 365, "d")
    return f"{days // 365}y"


def _two(first: int, unit: str, second: int, below: str) -> str:
    return f"{first}{unit}{second}{below}" if second else f"{first}{unit}"
