"""Schedules of CronJobs: five fields, or a descriptor such as `@daily`, in a time zone.

The package cronsim computes the times. It is imported with the first CronJob.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

_DESCRIPTORS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_EVERY = re.compile(r"@every (?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(?:/[A-Za-z0-9_+-]+)*", re.ASCII)


def schedule_error(schedule: str) -> str:
    """Return what is wrong with a schedule, empty if nothing is."""
    try:
        next(times_after(schedule, "", datetime(2000, 1, 1, tzinfo=UTC)), None)
    except ValueError as error:
        return str(error)
    return ""


def zone_error(zone: str) -> str:
    """Return what is wrong with the name of a time zone, empty if nothing is."""
    if not zone:
        return "timeZone must be nil or non-empty string"
    if zone.lower() == "local":
        return "timeZone must be an explicit time zone as defined in https://www.iana.org/time-zones"
    try:
        _zone(zone)
    except ValueError as error:
        return str(error)
    return ""


def times_after(schedule: str, zone: str, moment: datetime) -> Iterator[datetime]:
    """Yield the times of a schedule after a moment, in UTC. `zone` may be empty. Raises ValueError with the reason."""
    if (step := _interval(schedule)) is not None:
        return _repeated(moment.astimezone(UTC).replace(microsecond=0), step)
    return _cron(_fields(schedule), _zone(zone), moment)


def last_before(schedule: str, zone: str, since: datetime, now: datetime) -> datetime | None:
    """Return the last time of a schedule after `since` and not after `now`, None if there is none. Raises ValueError."""
    if (step := _interval(schedule)) is not None:
        steps = int((now - since) / step)
        return since + steps * step if steps else None
    # Backwards from the second after `now`, which may itself be such a time.
    times = _cron(_fields(schedule), _zone(zone), now.replace(microsecond=0) + timedelta(seconds=1), reverse=True)
    latest = next(times, None)
    return latest if latest is not None and latest > since else None


def _interval(schedule: str) -> timedelta | None:
    """Return the interval of `@every`, None for another schedule."""
    every = _EVERY.fullmatch(schedule)
    if every is None:
        return None
    hours, minutes, seconds = (int(each or 0) for each in every.groups())
    return max(timedelta(hours=hours, minutes=minutes, seconds=seconds), timedelta(seconds=1))


def _repeated(start: datetime, step: timedelta) -> Iterator[datetime]:
    while True:
        start += step
        yield start


def _fields(schedule: str) -> str:
    if schedule.startswith("@"):
        if schedule not in _DESCRIPTORS:
            raise ValueError(f"unrecognized descriptor: {schedule}")
        return _DESCRIPTORS[schedule]
    fields = schedule.split()
    if len(fields) != 5:
        raise ValueError(f"expected exactly 5 fields, found {len(fields)}: [{' '.join(fields)}]")
    # As in upstream's schedules, a question mark means any.
    return " ".join("*" + field[1:] if field.startswith("?") else field for field in fields)


def _cron(fields: str, zone: tzinfo, moment: datetime, *, reverse: bool = False) -> Iterator[datetime]:
    try:
        from cronsim import CronSim, CronSimError
    except ImportError:
        raise ValueError("schedules need the package cronsim: install narthex[lab]") from None
    try:
        times = CronSim(fields, moment.astimezone(zone), reverse)
    except CronSimError as error:
        raise ValueError(str(error)) from None
    return (each.astimezone(UTC) for each in times)


def _zone(name: str) -> tzinfo:
    if not name or name == "UTC":
        return UTC
    # Few labs have a CronJob with a time zone.
    from zoneinfo import ZoneInfo

    try:
        if _ZONE.fullmatch(name):
            return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        pass
    raise ValueError(f"unknown time zone {name}")
