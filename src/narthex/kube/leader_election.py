"""Leader election by one Lease, compatible with client-go: the state machine without I/O, and the thread that drives it.

    ReadLease ── another holder renews it ──> WaitUntil ──> ReadLease ...
      └──── free or expired ──> WriteLease ── stored ──> lead, WaitUntil, WriteLease, WaitUntil, ...

The clocks of two machines are never compared. A waiting candidate measures on its own clock for how long the Lease
has not changed. The leader measures from the moment before it sent the accepted renewal, and stops writing well
before another may acquire the Lease. The wall clock reveals a machine that slept through that. The thread does
nothing else, so that slow work does not delay a renewal.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import AlreadyExistsError, ApiError, ApiWriter, ConflictError, NotFoundError, writing
from narthex.linux.background import in_background
from narthex.runtime.logs import LOGGER, printable


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
            self._wait(now)

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
        self._wait(now)

    def refused(self, now: Moment) -> None:
        """Process a conflict: another process has written the Lease."""
        del now
        self._next = ReadLease()

    def failed(self, now: Moment) -> None:
        """Process a missing or useless response. The write may have succeeded."""
        self._wait(now)

    def release(self, now: Moment) -> WriteLease | None:
        """Return the write that releases the Lease, or None. Nothing else may be written afterwards."""
        if not self._leading or self._seen is None:
            return None
        self._lose()
        return WriteLease(msgspec.structs.replace(self._seen, holder="", seconds=1.0, renewed=time_text(now.wall)))

    def _mine(self, now: Moment) -> LeaseRecord:
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

    def _wait(self, now: Moment) -> None:
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


_REQUEST_SECONDS = 4.0


def moment() -> Moment:
    """Return the present time. The steady clock includes the time that the machine sleeps."""
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class Leader:
    """One candidate for one Lease. Its state may be read from any thread."""

    def __init__(
        self, access: Access, namespace: str, name: str, identity: str, times: LeaseTimes = LEASE_TIMES
    ) -> None:
        self._access = access
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self._elector = Elector(identity, times)
        self._stop = threading.Event()
        self._trouble = ""

    @property
    def term(self) -> int:
        """Return the number of the present term, or 0 if this process does not lead."""
        return self._elector.term if self._elector.allowance(moment()) > 0 else 0

    @property
    def holder(self) -> str:
        """Return the identity of the last known leader."""
        return self._elector.holder

    def allowance(self, term: int) -> float:
        """Return the seconds for which writes are allowed in this term; not positive if they are not."""
        return self._elector.allowance(moment()) if self._elector.term == term else 0.0

    def running(self, notice: Callable[[], None]) -> AbstractContextManager[None]:
        """Take part in the election while the block runs, then release the Lease.

        `notice` is called when leadership may have begun or ended. Nothing may be written after the block.
        """
        return in_background("leader", lambda: self._run(notice), self._stop.set)

    def _run(self, notice: Callable[[], None]) -> None:
        with asyncio.Runner() as runner:
            while not self._stop.is_set():
                try:
                    runner.run(self._stand(notice))
                except Exception as error:
                    # Without this thread, the controller would wait forever without a message.
                    LOGGER.error("leader election failed: %s: %s", type(error).__name__, printable(str(error)))
                    self._stop.wait(self._elector.times.retry)

    async def _stand(self, notice: Callable[[], None]) -> None:
        async with writing(self._access, _REQUEST_SECONDS) as writer:
            while not self._stop.is_set():
                before = self.term
                action = self._elector.act(moment())
                if isinstance(action, WaitUntil):
                    await asyncio.to_thread(self._stop.wait, max(0.0, action.until - moment().steady))
                else:
                    await self._do(writer, action)
                if self.term != before:
                    self._tell(before)
                    notice()
            if (last := self._elector.release(moment())) is not None:
                with suppress(ApiError):
                    await self._write(writer, last.record)

    async def _do(self, writer: ApiWriter, action: ReadLease | WriteLease) -> None:
        sent = moment()
        try:
            if isinstance(action, ReadLease):
                self._elector.read(await self._read(writer), moment())
            else:
                self._elector.wrote(await self._write(writer, action.record), sent, moment())
            self._trouble = ""
        except (ConflictError, AlreadyExistsError):
            self._elector.refused(moment())
        except ApiError as error:
            self._elector.failed(moment())
            said = printable(str(error))
            if said != self._trouble:
                LOGGER.warning("the Lease %s cannot be read or written: %s", self._name, said)
            self._trouble = said

    async def _read(self, writer: ApiWriter) -> LeaseRecord | None:
        try:
            return record_of(await writer.get(f"{self._collection}/{self._name}"))
        except NotFoundError:
            return None

    async def _write(self, writer: ApiWriter, record: LeaseRecord) -> LeaseRecord:
        if not record.version:
            body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
            return record_of(await writer.create(self._collection, {**body, "spec": spec_of(record)}))
        patch = {"metadata": {"resourceVersion": record.version}, "spec": spec_of(record)}
        return record_of(await writer.patch(f"{self._collection}/{self._name}", patch))

    def _tell(self, before: int) -> None:
        if self.term:
            LOGGER.info("leading, as %s", self._elector.identity)
        elif before:
            LOGGER.warning("not leading any more; the Lease is held by %s", printable(self.holder) or "no process")
