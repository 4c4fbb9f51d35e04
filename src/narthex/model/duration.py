"""Go durations, as used in the configuration of Kubernetes, CoreDNS, and related programs."""

from __future__ import annotations

import re

_DURATION = re.compile(r"[-+]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h))+|[-+]?0", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Return the seconds of a Go duration such as `30s`, `1h15m`, or `250ms`, to the nanosecond. Raises ValueError."""
    if len(text) > 64 or not _DURATION.fullmatch(text):
        raise ValueError("is not a duration such as 30s, 1h15m or 250ms")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
    seconds = round(seconds * 1e9) / 1e9
    return -seconds if text.startswith("-") else seconds


def duration_text(seconds: float) -> str:
    """Format seconds as Go prints a duration: `1h15m0s`, `250ms`, `0s`; rounded to nanoseconds."""
    count = round(seconds * 1e9)
    if count <= 0:
        return "0s"
    for unit, size in (("ns", 1), ("µs", 1_000), ("ms", 1_000_000)):
        if count < size * 1000:
            return f"{_decimal(count, size)}{unit}"
    minutes, rest = divmod(count, 60 * 1_000_000_000)
    hours, minutes = divmod(minutes, 60)
    before = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
    return f"{before}{_decimal(rest, 1_000_000_000)}s"


def _decimal(count: int, size: int) -> str:
    """Return `count / size` without rounding and without trailing zeros; `size` is a power of ten."""
    whole, rest = divmod(count, size)
    return f"{whole}.{rest:0{len(str(size)) - 1}d}".rstrip("0") if rest else str(whole)
