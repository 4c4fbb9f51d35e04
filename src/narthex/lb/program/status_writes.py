"""Writers of Service statuses: the controller's addresses, and the announcers' condition `narthex/Announced`.

Addresses are written one Service at a time, limited by the Lease, based on the decided version, and rate-limited. Each
node writes only the conditions of its own Services (`Announcer.conditions`), only on changes, and reads the stored one
first, so that a restart writes nothing. Also reads the status addresses of Services that the decoder rejects.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import (
    ApiClient,
    ApiError,
    ApiWriter,
    ConflictError,
    JsonObject,
    NoResponseError,
    NotFoundError,
    writing,
)
from narthex.kube.resources import ALL_SERVICES
from narthex.lb.service_status import (
    ServiceChanges,
    ServiceCondition,
    condition_patch,
    pool_patch,
    removal_patch,
    service_path,
)
from narthex.lb.why import CONDITION
from narthex.linux.background import in_background
from narthex.linux.clock import Clock
from narthex.model import NamespacedName, Service, address
from narthex.model.backoff import Backoff
from narthex.runtime.logs import LOGGER, printable

_REQUEST_SECONDS = 10.0
_LIST_SECONDS = 30.0
_BACKOFF = Backoff(0.5, 60.0)
_AGAIN_SECONDS = 60.0
"""Writes closer together indicate a conflict with another writer."""
_STALE_SECONDS = 30.0
"""After a write the watch must deliver the new version; after this long it is not waited for."""


class _Attempt(msgspec.Struct):
    version: str
    """The version that the write was based on; no new decision is possible while it is the known one. Empty: the write failed.
    """
    until: float
    """No new write before this, unless a new version arrives."""
    failures: int = 0
    at: float = -1e9
    quarrels: int = 0
    """Writes shortly after another one; they back off as well, so that another writer is not fought at full speed."""


class WriteOutcome(enum.Enum):
    """Outcome of a write."""

    DONE = enum.auto()
    REFUSED = enum.auto()
    UNKNOWN = enum.auto()
    """The server failed and may have performed it."""


class ServerUnavailable(Exception):
    """The server does not respond: other writes are pointless now."""


class StatusWriter:
    """Writes Service statuses, and reads those of Services that cannot be decoded. Used and closed by one thread."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._clock = clock
        self._runner = asyncio.Runner()
        self._api = ApiClient(access)
        self._writer = ApiWriter(self._api, _REQUEST_SECONDS)
        self._attempts: dict[NamespacedName, _Attempt] = {}
        self.results: Counter[str] = Counter()
        """Number of writes by result: done, conflict, gone, refused, unanswered."""

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._api.aclose())
        self._runner.close()

    def waits(self, service: Service) -> float:
        """Return the seconds for which this Service must not be written; 0 if it may be."""
        attempt, now = self._attempts.get(service.key), self._clock.now()
        if attempt is None:
            return 0.0
        if attempt.version and attempt.version != service.resource_version:
            return max(0.0, attempt.at + _BACKOFF.delay(attempt.quarrels) - now)
        return max(0.0, attempt.until - now)

    def forget(self, there: Callable[[NamespacedName], bool]) -> None:
        """Discard the state of deleted Services."""
        for key in [key for key in self._attempts if not there(key)]:
            del self._attempts[key]

    def write(
        self, service: Service, changes: ServiceChanges, allowance: Callable[[], float], taken: Callable[[], object]
    ) -> WriteOutcome:
        """Write the changes of a Service. Raises ServerUnavailable.

        `allowance` returns the seconds for which writing is allowed. `taken` is called when the server has accepted the status,
        whatever happens to the annotation.
        """
        path, version = service_path(service.key), service.resource_version
        try:
            if changes.status is not None:
                stored = self._patch(path, changes.status, "status", allowance)
                taken()
                version = str((stored.get("metadata") or {}).get("resourceVersion") or "")
            if changes.pool is not None:
                self._patch(path, pool_patch(changes.pool, version), "", allowance)
        except (ConflictError, NotFoundError) as error:
            # Another write won; the watch will deliver it, and the next decision uses it.
            self.results["conflict" if isinstance(error, ConflictError) else "gone"] += 1
            self._await_news(service)
            return WriteOutcome.REFUSED
        except ApiError as error:
            self._put_off(service)
            LOGGER.warning("%s: %s", service.key, printable(str(error)))
            if isinstance(error, NoResponseError):
                self.results["unanswered"] += 1
                raise ServerUnavailable from error
            self.results["refused"] += 1
            return WriteOutcome.UNKNOWN if error.code >= 500 else WriteOutcome.REFUSED
        self.results["done"] += 1
        before, now = self._attempts.get(service.key), self._clock.now()
        self._await_news(service)
        if before is not None and now - before.at < _AGAIN_SECONDS:
            self._attempts[service.key].quarrels += 1
        self._attempts[service.key].at = now
        return WriteOutcome.DONE

    def held_by_unreadable(
        self, readable: Callable[[NamespacedName], bool]
    ) -> Mapping[NamespacedName, tuple[str, ...]] | None:
        """Return the status addresses of all Services that are not `readable`; None if the server does not respond."""
        self._writer.seconds = _LIST_SECONDS
        try:
            found = self._runner.run(self._writer.get(ALL_SERVICES.paths[0]))
        except ApiError as error:
            LOGGER.warning(
                "cannot list the Services that failed to decode, which may hold addresses: %s", printable(str(error))
            )
            return None
        held = {_key(raw): _addresses(raw) for raw in found.get("items") or () if isinstance(raw, dict)}
        return {key: addresses for key, addresses in held.items() if addresses and not readable(key)}

    def _await_news(self, service: Service) -> None:
        before = self._attempts.get(service.key)
        made = _Attempt(service.resource_version, self._clock.now() + _STALE_SECONDS)
        if before is not None:
            made.at, made.quarrels = before.at, before.quarrels
        self._attempts[service.key] = made

    def _patch(self, path: str, body: JsonObject, subresource: str, allowance: Callable[[], float]) -> JsonObject:
        seconds = min(_REQUEST_SECONDS, allowance())
        if seconds <= 0:
            raise NoResponseError(0, "PATCH", path, "not sent: this controller is no longer the leader")
        self._writer.seconds = seconds
        return self._runner.run(self._writer.patch(path, body, subresource=subresource))

    def _put_off(self, service: Service) -> None:
        before = self._attempts.get(service.key)
        failures = 1 + (before.failures if before is not None else 0)
        self._attempts[service.key] = _Attempt("", self._clock.now() + _BACKOFF.delay(failures), failures)


def _key(raw: dict[str, Any]) -> NamespacedName:
    meta = raw.get("metadata") or {}
    return NamespacedName(str(meta.get("namespace") or "default"), str(meta.get("name") or ""))


def _addresses(raw: dict[str, Any]) -> tuple[str, ...]:
    balancer = (raw.get("status") or {}).get("loadBalancer") or {}
    found = []
    for entry in balancer.get("ingress") or ():
        try:
            found.append(address(str(entry.get("ip") or "")))
        except ValueError:
            # Not an address, so no pool contains it.
            continue
    return tuple(found)


_PAUSE_SECONDS = 0.2
_SETTLE_SECONDS = 1.0
"""A change is written once it has been stable for this long, so that handovers cause no intermediate writes."""
_AFTER_FAILURE_SECONDS = 10.0
_REQUEST_SECONDS = 10.0


class ConditionWriter:
    """Writes conditions from its own thread."""

    def __init__(
        self,
        access: Access,
        *,
        settle: float = _SETTLE_SECONDS,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._access = access
        self._settle = settle
        self._today = today
        self._desired: Mapping[NamespacedName, ServiceCondition] = {}
        self._announced: Collection[NamespacedName] = ()
        self._written: dict[NamespacedName, ServiceCondition] = {}
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._said = ""
        self.writes = 0

    def want(
        self, conditions: Mapping[NamespacedName, ServiceCondition], announced: Collection[NamespacedName]
    ) -> None:
        """Set the desired conditions. Thread-safe.

        `announced` are the Services that have a condition, which other nodes may write. This writer removes what it has written to
        another one, such as a Service that is no load balancer any more.
        """
        if (conditions, announced) != (self._desired, self._announced):
            self._desired, self._announced = conditions, announced
            self._changed.set()

    def running(self) -> AbstractContextManager[None]:
        """Return a context manager that runs the writer thread."""
        return in_background("conditions", self._run, self._end, patience=_REQUEST_SECONDS)

    def _end(self) -> None:
        self._stop.set()
        self._changed.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._changed.wait()
            if self._stop.wait(self._settle):
                return
            self._changed.clear()
            try:
                asyncio.run(self._write_all())
            except ApiError as error:
                if str(error) != self._said:
                    self._said = str(error)
                    LOGGER.warning("announcer: writing a Service condition failed: %s", printable(str(error)))
                self._changed.set()
                if self._stop.wait(_AFTER_FAILURE_SECONDS):
                    return

    async def _write_all(self) -> None:
        desired, announced = self._desired, self._announced
        # Forget conditions that other nodes write now: they may have changed when they are ours again.
        self._written = {key: each for key, each in self._written.items() if key in desired or key not in announced}
        async with writing(self._access, _REQUEST_SECONDS) as writer:
            for key in sorted(self._written.keys() - desired.keys()):
                if self._stop.is_set():
                    return
                # A Service that was deleted has no condition either.
                with contextlib.suppress(NotFoundError):
                    await writer.patch(
                        service_path(key), removal_patch(CONDITION), kind="strategic", subresource="status"
                    )
                    self.writes += 1
                    await asyncio.sleep(_PAUSE_SECONDS)
                del self._written[key]
            for key, condition in sorted(desired.items()):
                if self._stop.is_set():
                    return
                if self._written.get(key) == condition:
                    continue
                try:
                    await self._write(writer, key, condition)
                except NotFoundError:
                    # The Service was deleted; its condition will be dropped soon.
                    continue
                self._written[key] = condition
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _write(self, writer: ApiWriter, key: NamespacedName, condition: ServiceCondition) -> None:
        path = service_path(key)
        patch = condition_patch(condition, self._today().strftime("%Y-%m-%dT%H:%M:%SZ"))
        entry = patch["status"]["conditions"][0]
        there = _there(await writer.get(path), condition.type)
        if all(there.get(name) == entry[name] for name in ("status", "reason", "message")):
            return
        if there.get("status") == entry["status"] and there.get("lastTransitionTime"):
            entry["lastTransitionTime"] = there["lastTransitionTime"]
        await writer.patch(path, patch, kind="strategic", subresource="status")
        self.writes += 1


def _there(service: Mapping[str, Any], type_: str) -> dict[str, Any]:
    found = (service.get("status") or {}).get("conditions") or []
    return next((each for each in found if isinstance(each, dict) and each.get("type") == type_), {})
