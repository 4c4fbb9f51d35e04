"""Leader election: acquires and renews a controller's Lease.

It runs in a thread of its own, so that slow work does not delay a renewal.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from narthex.kube.access import Access
from narthex.kube.lease import (
    LEASE_TIMES,
    Elector,
    LeaseRecord,
    LeaseTimes,
    Moment,
    ReadLease,
    WaitUntil,
    WriteLease,
    record_of,
    spec_of,
)
from narthex.kube.writes import AlreadyExistsError, ApiError, ApiWriter, ConflictError, NotFoundError, writing
from narthex.linux.background import in_background
from narthex.runtime.logs import LOGGER, printable

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
        async with writing(self._access) as writer:
            while not self._stop.is_set():
                before = self.term
                action = self._elector.act(moment())
                if isinstance(action, WaitUntil):
                    await self._rest(action.until)
                else:
                    await self._do(writer, action)
                if self.term != before:
                    self._tell(before)
                    notice()
            if (last := self._elector.release(moment())) is not None:
                with suppress(ApiError, TimeoutError):
                    await self._write(writer, last.record)

    async def _rest(self, until: float) -> None:
        """Wait until a point in time, or until the election ends."""
        await asyncio.to_thread(self._stop.wait, max(0.0, until - moment().steady))

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
        except (ApiError, TimeoutError) as error:
            self._elector.failed(moment())
            said = printable(str(error)) or f"no answer within {_REQUEST_SECONDS:g} s"
            if said != self._trouble:
                LOGGER.warning("the Lease %s cannot be read or written: %s", self._name, said)
            self._trouble = said

    async def _read(self, writer: ApiWriter) -> LeaseRecord | None:
        async with asyncio.timeout(_REQUEST_SECONDS):
            try:
                return record_of(await writer.get(f"{self._collection}/{self._name}"))
            except NotFoundError:
                return None

    async def _write(self, writer: ApiWriter, record: LeaseRecord) -> LeaseRecord:
        async with asyncio.timeout(_REQUEST_SECONDS):
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
