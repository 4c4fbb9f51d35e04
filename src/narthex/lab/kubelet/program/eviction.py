"""Measures the files that the containers of one pod write, and evicts the pod if one exceeds its limit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

from narthex.lab.containers.root import SCRATCH_BYTES
from narthex.lab.kubelet.eviction import storage_limits
from narthex.lab.kubelet.program.containers import ContainerRun
from narthex.lab.kubelet.program.work_queue import WorkQueue

_CHECK_SECONDS = 2.0
"""Time between two checks. A kubelet takes 10 s, since it reads all files; here each container has a file system of its own."""


class MeasuredPod(Protocol):
    """What the check needs from a pod. All methods are called in the thread of its node."""

    runs: dict[str, ContainerRun]
    finished: bool

    def evict(self, message: str) -> None:
        """End the pod for good."""


class StorageCheck:
    """Checks one pod. All methods are called in the thread of its node."""

    def __init__(self, lifecycle: MeasuredPod, pod: Mapping[str, Any], worker: WorkQueue) -> None:
        self._lifecycle = lifecycle
        self._limits = storage_limits(pod)
        self._worker = worker

    def start(self) -> None:
        """Begin to check. A pod without limits is never checked."""
        if self._limits:
            self._worker.after(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        if self._lifecycle.finished:
            return
        for name, limit in self._limits.items():
            run = self._lifecycle.runs.get(name)
            if run is not None and run.container is not None and _written(run.container.pid) > limit.size:
                self._lifecycle.evict(limit.exceeded(name))
                return
        self.start()


def _written(process: int) -> int:
    """Return the bytes of the files that a container has written; 0 once it has ended, and for one without writable files."""
    with contextlib.suppress(OSError):
        # The numbers of an overlay are those of its upper layer, the container's memory file system.
        found = os.statvfs(f"/proc/{process}/root")
        if found.f_blocks * found.f_frsize == SCRATCH_BYTES:
            return (found.f_blocks - found.f_bfree) * found.f_frsize
    return 0
