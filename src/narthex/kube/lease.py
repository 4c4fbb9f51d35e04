"""Leader election by one Lease, compatible with client-go. Pure.

    ReadLease ── another holder renews it ──> WaitUntil ──> ReadLease ...
      └──── free or expired ──> WriteLease ── stored ──> lead, WaitUntil, WriteLease, WaitUntil, ...

The clocks of two machines are never compared. A waiting candidate measures on its own clock for how long the Lease
has not changed. The leader measures from the moment before it sent the accepted renewal, and stops writing well
before another may acquire the Lease. The wall clock reveals a machine that slept through that.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds; `retry` is much less than `renew`, which is less than `lease`."""

    lease: float = 15.0
    """After a renewal, no other candidate may acquire the Lease for this long."""
    renew: float = 10.0
    """The holder acts on a renewal for this long."""
    retry: float = 2.0
    """Between two reads or renewals."""


LEASE_TIMES = LeaseTimes()


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a Lease object."""

    version: str = ""
    """`resourceVersion`; empty if there is no Lease yet."""
    holder: str = ""
    seconds: float = 0.0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0


class Moment(msgspec.Struct, frozen=True):
    """A point in time on two clocks."""

    steady: float
    """Seconds on a monotonic clock."""
    wall: float
    """Seconds since the epoch."""


class WaitUntil(msgspec.Struct, frozen=True):
    """Wait until this time on the steady clock."""

    until: float


class ReadLease(msgspec.Struct, frozen=True):
    """Read the Lease, then call `read`."""


class WriteLease(msgspec.Struct, frozen=True):
    """Write the Lease if its version is unchanged (empty: create it), then call `wrote` or `refused`."""

    record: LeaseRecord


LeaseAction = WaitUntil | ReadLease | WriteLease


class Elector:
    """The state machine of one candidate. One thread drives it; `allowance` may be called from any."""

    def __init__(self, identity: str, times: LeaseTimes = LEASE_TIMES) -> None:
        """Prepare a candidate. `identity` must be unique to this process."""
        self.identity = identity
        self.times = times
        self.term = 0
        """Number of terms so far."""
        self._leading = False
        self._seen: LeaseRecord | None = None
        self._changed_at = 0.0
        self._until = Moment(0.0, 0.0)
        self._next: LeaseAction = ReadLease()

    @property
    def leading(self) -> bool:
        """Return True if this candidate holds the Lease, as far as it knows."""
        return self._leading

    @property
    def holder(self) -> str:
        """Return the holder when the Lease was last read; empty if it had none."""
        return self._seen.holder if self._seen is not None else ""

    def allowance(self, now: Moment) -> float:
        """Return the seconds for which this candidate may write; not positive if it may not."""
        # Both clocks must agree: the steady one does not see a machine that was stopped, the wall clock may be set.
        return min(self._until.steady - now.steady, self._until.wall - now.wall) if self._leading else 0.0

    def act(self, now: Moment) -> LeaseAction:
        """Return the next action."""
        if self._leading and now.steady >= self._until.steady:
            self._lose()
        if isinstance(self._next, WaitUntil) and now.steady >= self._next.until:
            self._next = WriteLease(self._mine(now)) if self._leading else ReadLease()
        elif isinstance(self._next, WaitUntil) and self._leading:
            return WaitUntil(min(self._next.until, self._until.steady))
        return self._next

    def read(self, record: LeaseRecord | None, now: Moment) -> None:
        """Process the Lease that was read; None if there is none."""
        record = record or LeaseRecord()
        if self._seen is None or record != self._seen:
            self._seen, self._changed_at = record, now.steady
        if self._leading and record.holder != self.identity:
            self._lose()
        expired = now.steady - self._changed_at > max(record.seconds, self.times.lease)
        if record.holder in ("", self.identity) or expired:
            self._next = WriteLease(self._mine(now))
        else:
            self._rest(now)

    def wrote(self, record: LeaseRecord, sent: Moment, now: Moment) -> None:
        """Process the Lease that was stored, and the time at which it was sent."""
        self._seen, self._changed_at = record, now.steady
        if record.holder != self.identity:
            self._lose()
        else:
            if not self._leading:
                self._leading = True
                self.term += 1
            self._until = Moment(sent.steady + self.times.renew, sent.wall + self.times.renew)
        self._rest(now)

    def refused(self, now: Moment) -> None:
        """Process a conflict: another process has written the Lease."""
        del now
        self._next = ReadLease()

    def failed(self, now: Moment) -> None:
        """Process a missing or useless response. The write may have succeeded."""
        self._next = WaitUntil(now.steady + self.times.retry)

    def release(self, now: Moment) -> WriteLease | None:
        """Return the write that releases the Lease, or None. Nothing else may be written afterwards."""
        if not self._leading or self._seen is None:
            return None
        self._lose()
        return WriteLease(msgspec.structs.replace(self._seen, holder="", seconds=1.0, renewed=time_text(now.wall)))

    def _mine(self, now: Moment) -> LeaseRecord:
        """Return the record that this candidate writes."""
        seen, text = self._seen or LeaseRecord(), time_text(now.wall)
        again = seen.holder == self.identity
        return LeaseRecord(
            version=seen.version,
            holder=self.identity,
            seconds=self.times.lease,
            acquired=seen.acquired if again else text,
            renewed=text,
            transitions=seen.transitions + (not again and bool(seen.version)),
        )

    def _rest(self, now: Moment) -> None:
        self._next = WaitUntil(now.steady + self.times.retry)

    def _lose(self) -> None:
        self._leading = False
        self._next = ReadLease()


def time_text(wall: float) -> str:
    """Return a time in the format of Leases (MicroTime)."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def spec_of(record: LeaseRecord) -> dict[str, Any]:
    """Return the `spec` of a Lease."""
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": max(1, round(record.seconds)),
        "acquireTime": record.acquired or None,
        "renewTime": record.renewed or None,
        "leaseTransitions": record.transitions,
    }


def record_of(raw: dict[str, Any]) -> LeaseRecord:
    """Return the record of a Lease object. Absent fields count as empty."""
    spec, meta = raw.get("spec") or {}, raw.get("metadata") or {}
    return LeaseRecord(
        version=str(meta.get("resourceVersion") or ""),
        holder=str(spec.get("holderIdentity") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
        acquired=str(spec.get("acquireTime") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
    )
