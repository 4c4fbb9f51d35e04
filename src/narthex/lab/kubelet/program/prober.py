"""Execution of probes and lifecycle hooks from the network of the pod's node.

`lab/kubelet/probes.py` evaluates the results. Messages are upstream's (`pkg/probe/http`, `pkg/probe/tcp`).
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from narthex.lab.containers.container import Containers, ContainerStartError
from narthex.lab.containers.program import ExecSpec
from narthex.lab.kubelet.probes import (
    ContainerProbe,
    ExecAction,
    HttpGetAction,
    ProbeAction,
    SleepAction,
    TcpSocketAction,
    is_http_success,
)
from narthex.linux.namespaces import in_namespace
from narthex.model import join_port

_PARALLEL = 8
_MAX_BYTES = 10 * 1024
"""Maximum length of a response that is read (`maxRespBodyLength`)."""


class ContainerProbeResult(NamedTuple):
    """The result of a probe."""

    ok: bool
    why: str = ""
    """Reason of a failure."""


class ProbeTarget(NamedTuple):
    """The container that a probe checks."""

    namespace: str
    """Network namespace of the node."""
    address: str
    """The pod's primary address."""
    process: int
    """PID of the container's program; 0 for the echo server."""
    environment: dict[str, str]


class Prober:
    """Runs several probes in parallel."""

    def __init__(self, containers: Containers) -> None:
        self._containers = containers
        self._pool = ThreadPoolExecutor(_PARALLEL, "probe")

    def run(
        self, probe: ContainerProbe, target: ProbeTarget, on_result: Callable[[ContainerProbeResult], None]
    ) -> None:
        """Run a probe; `on_result` is called in another thread."""
        self._pool.submit(lambda: on_result(self._run(probe.action, target, float(probe.timeout))))

    def run_hook(
        self,
        action: ProbeAction,
        target: ProbeTarget,
        timeout: float,
        on_result: Callable[[ContainerProbeResult], None],
    ) -> None:
        """Run a hook in a thread of its own, since it may take minutes; `on_result` is called there."""
        run = threading.Thread(target=lambda: on_result(self._run(action, target, timeout)), name="hook", daemon=True)
        run.start()

    def _run(self, action: ProbeAction, target: ProbeTarget, timeout: float) -> ContainerProbeResult:
        try:
            if isinstance(action, HttpGetAction):
                _get(action, target, timeout)
            elif isinstance(action, TcpSocketAction):
                _dial(target.namespace, action.host or target.address, action.port, timeout).close()
            elif isinstance(action, ExecAction):
                self._execute(action, target, timeout)
            elif isinstance(action, SleepAction):
                time.sleep(min(action.seconds, timeout))
            else:
                return ContainerProbeResult(False, action.why)
        except _ProbeFailure as failure:
            return ContainerProbeResult(False, str(failure))
        except Exception as error:
            # Any error caused by the probed server is a failed probe.
            return ContainerProbeResult(False, f"{type(error).__name__}: {error}")
        return ContainerProbeResult(True)

    def _execute(self, action: ExecAction, target: ProbeTarget, timeout: float) -> None:
        if not target.process:
            # The echo server has none of the image's programs; it is healthy while it serves.
            return
        reader, writer = os.pipe()
        try:
            with Path(os.devnull).open("rb") as null:
                entry = ExecSpec(target_pid=target.process, argv=action.command, environment=target.environment)
                program = self._containers.enter(entry, (null.fileno(), writer, writer))
            status = program.wait(timeout)
            if status is None:
                program.signal(9)
                command = " ".join(action.command)
                raise _ProbeFailure(f"command timed out: {command!r} timed out after {timeout:g}s")
            ready, _, _ = select.select([reader], [], [], 0)
            output = os.read(reader, _MAX_BYTES).decode(errors="replace") if ready else ""
            if status != 0:
                raise _ProbeFailure(output)
        except ContainerStartError as error:
            raise _ProbeFailure(str(error)) from error
        finally:
            os.close(reader)
            os.close(writer)


class _ProbeFailure(Exception):
    """A failed probe; the message says why."""


def _get(action: HttpGetAction, target: ProbeTarget, timeout: float) -> None:
    host = action.host or target.address
    url = f"{action.scheme}://{join_port(host, action.port)}{action.path}"
    deadline = time.monotonic() + timeout
    try:
        with _with_tls(_dial(target.namespace, host, action.port, timeout), action) as stream:
            stream.settimeout(max(0.001, deadline - time.monotonic()))
            stream.sendall(_request(action, join_port(host, action.port)))
            head = b""
            while b"\r\n" not in head and len(head) < _MAX_BYTES:
                part = stream.recv(_MAX_BYTES)
                if not part:
                    break
                head += part
    except TimeoutError:
        why = f'Get "{url}": context deadline exceeded (Client.Timeout exceeded while awaiting headers)'
        raise _ProbeFailure(why) from None
    except (_ProbeFailure, OSError) as error:
        raise _ProbeFailure(f'Get "{url}": {getattr(error, "strerror", None) or error}') from error
    parts = head.split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or not parts[1].isdigit():
        raise _ProbeFailure(f'Get "{url}": net/http: HTTP/1.x transport connection broken: malformed HTTP response')
    if not is_http_success(int(parts[1])):
        raise _ProbeFailure(f"HTTP probe failed with statuscode: {int(parts[1])}")


def _request(action: HttpGetAction, authority: str) -> bytes:
    headers = {"host": authority, "user-agent": "kube-probe/1.34", "accept": "*/*", "connection": "close"}
    headers |= {name.lower(): value for name, value in action.headers}
    lines = "".join(f"{_plain(name)}: {_plain(value)}\r\n" for name, value in headers.items())
    return f"GET {_plain(action.path).replace(' ', '%20')} HTTP/1.1\r\n{lines}\r\n".encode()


def _plain(text: str) -> str:
    """Remove line breaks, which would start another header."""
    return text.replace("\r", "").replace("\n", "")


def _with_tls(sock: socket.socket, action: HttpGetAction) -> socket.socket:
    if action.scheme != "https":
        return sock
    # A kubelet does not verify certificates.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


def _dial(namespace: str, host: str, port: int, timeout: float) -> socket.socket:
    """Return a connection from a namespace. Raises _ProbeFailure."""
    where = f"dial tcp {join_port(host, port)}"
    try:
        with in_namespace(namespace):
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect((host, port))
        except OSError:
            sock.close()
            raise
    except TimeoutError:
        raise _ProbeFailure(f"{where}: i/o timeout") from None
    except OSError as error:
        raise _ProbeFailure(f"{where}: connect: {(error.strerror or str(error)).lower()}") from error
    return sock
