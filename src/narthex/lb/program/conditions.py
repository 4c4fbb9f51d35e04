"""Writer of the Service condition `narthex/Announced`, rate-limited and only on changes.

Each node writes only its own Services (`Announcer.conditions`). The stored condition is read first, so that a restart
writes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

from narthex.kube.access import Access
from narthex.kube.writes import ApiError, ApiWriter, NotFoundError, writing
from narthex.lb.service_status import ServiceCondition, condition_patch
from narthex.linux.background import in_background
from narthex.model.objects import NamespacedName
from narthex.runtime.logs import LOGGER, printable

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
        self._written: dict[NamespacedName, ServiceCondition] = {}
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._said = ""
        self.writes = 0

    def want(self, conditions: Mapping[NamespacedName, ServiceCondition]) -> None:
        """Set the desired conditions. Thread-safe."""
        if conditions != self._desired:
            self._desired = conditions
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
            except (ApiError, TimeoutError) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    LOGGER.warning(
                        "announcer: writing a Service condition failed: %s",
                        printable(str(error) or "the request timed out"),
                    )
                self._changed.set()
                if self._stop.wait(_AFTER_FAILURE_SECONDS):
                    return

    async def _write_all(self) -> None:
        desired = self._desired
        # Forget conditions that other nodes write now: they may have changed when they are ours again.
        self._written = {key: each for key, each in self._written.items() if key in desired}
        async with writing(self._access) as writer:
            for key, condition in sorted(desired.items()):
                if self._stop.is_set():
                    return
                if self._written.get(key) == condition:
                    continue
                async with asyncio.timeout(_REQUEST_SECONDS):
                    try:
                        await self._write(writer, key, condition)
                    except NotFoundError:
                        # The Service was deleted; its condition will be dropped soon.
                        continue
                self._written[key] = condition
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _write(self, writer: ApiWriter, key: NamespacedName, condition: ServiceCondition) -> None:
        path = f"/api/v1/namespaces/{key.namespace}/services/{key.name}"
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
    """Return the stored condition of a Service."""
    found = (service.get("status") or {}).get("conditions") or []
    return next((each for each in found if isinstance(each, dict) and each.get("type") == type_), {})
