"""The resident agent of the CNI plugins: handles the requests of launchers in threads of a loaded process.

It serves launchers of its own network namespace only; others do the work themselves. It also restores rules that other
programs removed, at start-up and whenever the ruleset has changed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from narthex.cni import request as requests
from narthex.cni.errors import CniError
from narthex.cni.kernel.records import STATE
from narthex.cni.program import ipam as addresses
from narthex.cni.program import masquerade, pod_interfaces, portmap, run
from narthex.cni.program.node import NodeContext
from narthex.linux.nfnetlink import NfNetlink
from narthex.linux.setns import namespace_identity, own_namespace_identity

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Import these at start-up instead of in the first request.
LOADED = (addresses, pod_interfaces, portmap)

SOCKET = "/run/narthex/cni.sock"
_MOST = (1 << 20) + (1 << 16)
_MOST_FILES = 2
_REQUEST_SECONDS = 30.0
_STOP_SECONDS = 5.0
"""Time for running requests during shutdown."""
_RESTORE_SECONDS = 1.0
"""Time to wait for a request outside the agent that changes rules to be restored; requests of the agent wait meanwhile."""
_CHECK_SECONDS = 2.0
"""Interval at which the generation of the ruleset is checked."""
_WRONG_NAMESPACE = b"\xff"


class Agent:
    """The agent of one node, and a part of `narthex node`: `run`, or `open` and then `serve`, until `stop`."""

    def __init__(self, path: str = SOCKET, state: str = STATE) -> None:
        self._path = path
        self._state = state
        self._socket: socket.socket | None = None
        self._stopping = threading.Event()
        self._waker: socket.socket | None = None
        """Writing to it wakes `serve`."""
        self._generation: int | None = None
        self._condition = threading.Condition()
        """Requests run concurrently. Rules are restored only while there is no request: a half-finished one looks like
        removed rules."""
        self._requests = 0
        self._restoring = False
        self._idle: list[NodeContext] = []
        """Contexts without a request; `append` and `pop` of a list are thread-safe."""
        self._counts: Counter[tuple[str, str, str]] = Counter()
        """Requests by plugin, command, and outcome."""

    @property
    def healthy(self) -> bool:
        """True while it listens."""
        return self._socket is not None and not self._stopping.is_set()

    def run(self) -> None:
        """Listen and answer until `stop`. Raises OSError if it cannot listen."""
        self.open()
        self.serve()

    def open(self) -> None:
        """Restore missing rules, and listen. Raises OSError, also if another agent listens on the socket."""
        path = Path(self._path)
        path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _refuse_second(self._path)
            self.restore_rules()
            path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                listener.bind(self._path)
            finally:
                os.umask(before)
            listener.listen(256)
        except BaseException:
            listener.close()
            raise
        self._socket = listener

    def serve(self) -> None:
        """Answer until `stop`."""
        listener = self._socket
        assert listener is not None
        self._waker, woken = socket.socketpair()
        try:
            with selectors.DefaultSelector() as waiting:
                waiting.register(listener, selectors.EVENT_READ)
                waiting.register(woken, selectors.EVENT_READ)
                while not self._stopping.is_set():
                    found = [key.fileobj for key, _ in waiting.select(_CHECK_SECONDS)]
                    if listener in found:
                        connection, _ = listener.accept()
                        threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
                    elif not found:
                        self.restore_rules()
        finally:
            for one in (listener, woken, self._waker):
                one.close()
            self._socket = self._waker = None
            Path(self._path).unlink(missing_ok=True)
            with self._condition:
                # Requests that have arrived are still answered.
                self._condition.wait_for(lambda: not self._requests, _STOP_SECONDS)
                for node in self._idle:
                    node.close()
                self._idle.clear()

    def stop(self) -> None:
        """Let `serve` return. Safe from any thread and in a signal handler."""
        self._stopping.set()
        waker = self._waker
        if waker is not None:
            with contextlib.suppress(OSError):
                # It may be closed already, by a `serve` that has seen the flag.
                waker.send(b"!")

    def restore_rules(self) -> int:
        """Restore missing rules if the ruleset has changed; return the number of elements."""
        with self._condition:
            if self._requests:
                return 0
            self._restoring = True
        try:
            return self._restored()
        finally:
            with self._condition:
                self._restoring = False
                self._condition.notify_all()

    def _restored(self) -> int:
        try:
            netlink = NfNetlink()
            try:
                if netlink.generation() == self._generation:
                    return 0
                restored = resync(self._state)
                self._generation = netlink.generation()
            finally:
                netlink.close()
        except (OSError, CniError):
            # Retried at the next check; requests report problems of the rules.
            return 0
        return restored

    def collect(self) -> Iterable[Metric]:
        """Return the request counters for prometheus-client."""
        from prometheus_client.core import CounterMetricFamily

        labels = ["plugin", "command", "outcome"]
        answers = CounterMetricFamily("narthex_cni_requests", "Answered requests of CNI plugins.", labels=labels)
        for key, count in dict(self._counts).items():
            answers.add_metric(list(key), count)
        return (answers,)

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_REQUEST_SECONDS)
            try:
                response = self._handle(connection)
                connection.sendall(response)
            except (OSError, ValueError):
                # The client disconnected or sent an invalid request.
                return

    def _handle(self, connection: socket.socket) -> bytes:
        files: list[int] = []
        try:
            _, uid, _ = struct.unpack("=iii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (0, os.geteuid()):
                return _WRONG_NAMESPACE
            parts = _received(connection, files)
            if not files or namespace_identity(files[0]) != own_namespace_identity():
                return _WRONG_NAMESPACE
            plugin, stdin, *pairs = parts
            texts = [part.decode("utf-8", "surrogateescape") for part in pairs]
            environment = dict(zip(texts[::2], texts[1::2], strict=True))
            name = plugin.decode()
            text, status = self._execute(name, environment, stdin, files.pop() if len(files) > 1 else None)
            self._count(name, environment.get("CNI_COMMAND", ""), status)
            return bytes([status]) + text.encode()
        finally:
            for one in files:
                os.close(one)

    def _execute(self, plugin: str, environment: dict[str, str], stdin: bytes, pod: int | None) -> tuple[str, int]:
        with self._condition:
            self._condition.wait_for(lambda: not self._restoring)
            self._requests += 1
        try:
            node = self._node()
            node.begin(pod)
            response = run.answer(plugin, environment, stdin, self._state, node)
            self._idle.append(node)
            return response
        finally:
            with self._condition:
                self._requests -= 1
                self._condition.notify_all()

    def _count(self, plugin: str, command: str, status: int) -> None:
        """Count a request; unknown plugins and commands share one label to limit the cardinality."""
        known = plugin if plugin in run.PLUGINS else "", command if command in requests.COMMANDS else ""
        with self._condition:
            self._counts[*known, "error" if status else "ok"] += 1

    def _node(self) -> NodeContext:
        try:
            return self._idle.pop()
        except IndexError:
            return NodeContext(self._state)


def _refuse_second(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise FileExistsError(f"another agent listens at {path}")


def _received(connection: socket.socket, files: list[int]) -> list[bytes]:
    """Return the parts of a request; received descriptors are appended to `files`. Raises OSError, ValueError."""
    data, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(4 * _MOST_FILES), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files += struct.unpack(f"={len(content) // 4}i", content[: len(content) // 4 * 4])
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        some = connection.recv(1 << 16)
        if not some or len(data) > _MOST:
            raise ValueError("a request that is cut or too long")
        data += some
    parts = []
    at = 4
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    if len(parts) < 2 or at != len(data):
        raise ValueError("a request in an unknown form")
    return parts


def resync(state: str) -> int:
    """Reconcile tables with records; return the number of missing and excess elements. Raises OSError, CniError."""
    node = NodeContext(state, _RESTORE_SECONDS)
    try:
        return portmap.resync(node) + masquerade.resync(node)
    finally:
        node.close()
