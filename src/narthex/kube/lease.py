"""Who of several controllers may write: one Lease, read and written like everybody's (client-go's election), without I/O.

    Read ── somebody else renews it ──> Rest ──> Read ...
      └──── free, or not renewed for its whole time ──> Write ── done ──> lead, Rest, Write, Rest, Write ...

Nobody compares clocks of two machines. Whoever waits measures, on its own clock, for how long the Lease has not changed;
whoever leads measures from the moment before it sent what was accepted, and stops writing well before the others may begin.
A machine that slept through that is found out by its wall clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; `renew` is less than `lease`, and `retry` much less than that."""

    lease: float = 15.0
    """For so long nobody else may take it after a renewal."""
    renew: float = 10.0
    """For so long the holder acts on a renewal."""
    retry: float = 2.0
    """Between two looks or renewals."""


LEASE_TIMES = LeaseTimes()


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A Lease as it is on the server."""

    version: str = ""
    """`resourceVersion`; empty: there is none yet."""
    holder: str = ""
    seconds: float = 0.0
    acquired: str = ""
    renewed: str = ""
    transitions: int = 0


class Moment(msgspec.Struct, frozen=True):
    """A moment."""

    steady: float
    """Seconds on a clock that nobody sets."""
    wall: float
    """Seconds since 1970."""


class WaitUntil(msgspec.Struct, frozen=True):
    """Nothing to do until then, on the steady clock."""

    until: float


class ReadLease(msgspec.Struct, frozen=True):
    """Read the Lease, then call `read`."""


class WriteLease(msgspec.Struct, frozen=True):
    """Write this, if the Lease is still of the record's version (empty: create it); then call `wrote` or `refused`."""

    record: LeaseRecord


LeaseAction = WaitUntil | ReadLease | WriteLease


class Elector:
    """One candidate. Driven by one thread; `allowance` may be asked from any."""

    def __init__(self, identity: str, times: LeaseTimes = LEASE_TIMES) -> None:
        """`identity` must be this process's alone."""
        self.identity = identity
        self.times = times
        self.term = 0
        """Counts how often it has begun to lead."""
        self._leading = False
        self._seen: LeaseRecord | None = None
        self._changed_at = 0.0
        self._until = Moment(0.0, 0.0)
        self._next: LeaseAction = ReadLease()

    @property
    def leading(self) -> bool:
        """Whether it has the Lease, as far as it knows."""
        return self._leading

    @property
    def holder(self) -> str:
        """Who had the Lease when it was last seen; empty when nobody had."""
        return self._seen.holder if self._seen is not None else ""

    def allowance(self, now: Moment) -> float:
        """Seconds for which this candidate may write; not positive: not at all."""
        # Both clocks must agree: the steady one does not see a machine that was stopped, the wall clock may be set.
        return min(self._until.steady - now.steady, self._until.wall - now.wall) if self._leading else 0.0

    def act(self, now: Moment) -> LeaseAction:
        """What to do now."""
        if self._leading and now.steady >= self._until.steady:
            self._lose()
        if isinstance(self._next, WaitUntil) and now.steady >= self._next.until:
            self._next = WriteLease(self._mine(now)) if self._leading else ReadLease()
        elif isinstance(self._next, WaitUntil) and self._leading:
            return WaitUntil(min(self._next.until, self._until.steady))
        return self._next

    def read(self, record: LeaseRecord | None, now: Moment) -> None:
        """The Lease as it was read; None: there is none."""
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
        """The Lease as it was stored, and when that was sent."""
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
        """The Lease was of another version: somebody else wrote it."""
        del now
        self._next = ReadLease()

    def failed(self, now: Moment) -> None:
        """No answer, or one that says nothing: try again; what was written may be there or not."""
        self._next = WaitUntil(now.steady + self.times.retry)

    def release(self, now: Moment) -> WriteLease | None:
        """What to write so that others need not wait, once nothing more will be written here; None: nothing."""
        if not self._leading or self._seen is None:
            return None
        self._lose()
        return WriteLease(msgspec.structs.replace(self._seen, holder="", seconds=1.0, renewed=time_text(now.wall)))

    def _mine(self, now: Moment) -> LeaseRecord:
        """The Lease as it is to be."""
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
    """A moment as Leases have it."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def spec_of(record: LeaseRecord) -> dict[str, Any]:
    """`spec` of the Lease."""
    return {
        "holderIdentity": record.holder,
        "leaseDurationSeconds": max(1, round(record.seconds)),
        "acquireTime": record.acquired or None,
        "renewTime": record.renewed or None,
        "leaseTransitions": record.transitions,
    }


def record_of(raw: dict[str, Any]) -> LeaseRecord:
    """The record of a Lease as JSON has it. What others may have left out counts as empty."""
    spec, meta = raw.get("spec") or {}, raw.get("metadata") or {}
    return LeaseRecord(
        version=str(meta.get("resourceVersion") or ""),
        holder=str(spec.get("holderIdentity") or ""),
        seconds=float(spec.get("leaseDurationSeconds") or 0),
        acquired=str(spec.get("acquireTime") or ""),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
    )
