"""A fork server: a process that forks others on request.

Its creator names the jobs that it has. It has one thread and has imported what the jobs need, so that each starts in milliseconds
instead of the third of a second that a new interpreter takes; a process with several threads could not fork safely. It ends with
its creator, and all its jobs with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import selectors
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from narthex.linux.processes import ProcessIdentity, die_with_parent, identify_process, kill_processes
from narthex.linux.run import TimeoutExpired

ForkJob = Callable[[socket.socket, bytes, Sequence[int]], None]
"""Called with the socket to the requester, the order, and files. Its process ends when it returns."""

_MOST_HANDLES = 250
"""Files of one job; Linux passes up to 253 in a message."""


class ProcessExit(msgspec.Struct, frozen=True):
    """The last message on a job's socket: its process has ended."""

    ended: int
    """Wait status, as from `os.waitpid`."""


PROCESS_EXITS = msgspec.json.Decoder(ProcessExit)


class _ProcessStart(msgspec.Struct, frozen=True):
    pid: int


_STARTS = msgspec.json.Decoder(_ProcessStart)


class ForkServer:
    """The handle of a fork server. Thread-safe."""

    def __init__(self, jobs: Mapping[str, ForkJob], prepare: Callable[[], None] = lambda: None) -> None:
        """Fork the server from a process with one thread. `prepare` runs in it before the first job."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                die_with_parent(lambda: os.getppid() == parent)
                self._socket.close()
                _serve(theirs, jobs, prepare)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        theirs.close()

    def start(self, job: str, order: bytes, files: Sequence[int] = ()) -> socket.socket:
        """Start a job with copies of these files. Return the socket to it. Raises OSError if the server is gone."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [job.encode()], [theirs.fileno(), *files])
            ours.sendall(len(order).to_bytes(4, "big") + order)
        except OSError:
            ours.close()
            raise
        return ours

    def close(self) -> None:
        """End the server and all its jobs."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class ForkedProcess:
    """The process of a job that calls `report_start`, seen from its requester. Thread-safe."""

    def __init__(self, forks: ForkServer, job: str, order: bytes, files: Sequence[int] = ()) -> None:
        """Start the job and wait until it reports. Raises OSError if the server is gone."""
        self._control = forks.start(job, order, files)
        self._lock = threading.Lock()
        self._status: int | None = None
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(1)):
            line += part
        self.identity: ProcessIdentity | None = None
        try:
            self.identity = identify_process(_STARTS.decode(line).pid)
        except msgspec.DecodeError:
            # The process ended before it sent the message.
            self._status = _exit_status(line)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with self._lock:
            if self._status is None:
                try:
                    line = self._control.recv(4096, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                except ConnectionError:
                    line = b""
                self._status = _exit_status(line)
            return self._status

    @property
    def pid(self) -> int:
        """Process ID; 0 if the process ended at once."""
        return self.identity.pid if self.identity is not None else 0

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end. Raises TimeoutExpired after so many seconds."""
        if self.poll() is None and not select.select([self._control], [], [], timeout)[0]:
            raise TimeoutExpired("a forked process", timeout or 0.0)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        if self.identity is not None:
            kill_processes([self.identity])


def report_start(control: socket.socket) -> None:
    """Send the number of this process to the requester, a ForkedProcess."""
    control.sendall(msgspec.json.encode(_ProcessStart(os.getpid())) + b"\n")


def _exit_status(line: bytes) -> int:
    """Return the exit status. The line is empty if the fork server has ended, too."""
    return os.waitstatus_to_exitcode(PROCESS_EXITS.decode(line).ended) if line else -signal.SIGKILL


def _serve(requests: socket.socket, jobs: Mapping[str, ForkJob], prepare: Callable[[], None]) -> NoReturn:
    _close_all_but(requests.fileno())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Imports leave hardly any garbage; to look for it would take a quarter of their time.
    gc.disable()
    prepare()
    # Memory is shared with all jobs until it is written to, as a garbage collection would.
    gc.freeze()
    gc.enable()
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    signal.set_wakeup_fd(ringer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requesters: dict[int, socket.socket] = {}
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(bell, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is bell:
                bell.recv(4096)
                _reap(requesters)
                continue
            name, handles, _, _ = socket.recv_fds(requests, 256, _MOST_HANDLES)
            for handle in handles:
                os.set_inheritable(handle, False)
            if not name:
                os._exit(0)
            requester = socket.socket(fileno=handles[0])
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                selector.close()
                for each in (requests, bell, ringer, *requesters.values()):
                    each.close()
                _work(jobs[name.decode()], requester, handles[1:], parent)
            for handle in handles[1:]:
                os.close(handle)
            requesters[child] = requester


def _work(job: ForkJob, requester: socket.socket, files: Sequence[int], parent: int) -> NoReturn:
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        die_with_parent(lambda: os.getppid() == parent)
        job(requester, _order(requester), files)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)


def _order(requester: socket.socket) -> bytes:
    order = b""
    with requester.dup().makefile("rb", buffering=0) as stream:
        size = int.from_bytes(stream.read(4) or b"", "big")
        while len(order) < size and (part := stream.read(size - len(order))):
            order += part
    return order


def _reap(requesters: dict[int, socket.socket]) -> None:
    while requesters:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not child:
            return
        requester = requesters.pop(child, None)
        if requester is not None:
            with contextlib.suppress(OSError):
                requester.send(msgspec.json.encode(ProcessExit(status)) + b"\n", socket.MSG_DONTWAIT)
            requester.close()


def _close_all_but(own: int) -> None:
    """Close inherited files, so that neither the server nor its jobs hold locks or pipes of the creator."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if int(entry.name) > 2 and int(entry.name) != own:
            with contextlib.suppress(OSError):
                os.close(int(entry.name))
