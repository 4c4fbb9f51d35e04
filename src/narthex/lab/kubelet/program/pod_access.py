"""Logs and exec for the API server."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import LogRequest
from narthex.lab.containers.container import ContainerStartError, RunningContainer
from narthex.lab.containers.log import LogReader, log_time
from narthex.lab.containers.program import ExecSpec, find_program
from narthex.lab.controllers.objects import Object, ObjectKey
from narthex.lab.kubelet.program.containers import (
    ContainerRun,
    PodDependencies,
    echo_name,
    environment_of,
    program_in_pod,
)
from narthex.lab.kubelet.program.kubelet import Kubelet
from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.kubelet.static_pods import is_mirror
from narthex.lab.kubelet.status import ContainerFacts, Running
from narthex.lab.server.pods import dial_from

_POLL_SECONDS = 0.1
_KEEPALIVE_POLLS = 5
_END_SECONDS = 5.0
"""Time between the end of a program's output and its own."""


class _ExecPlace(NamedTuple):
    pod: Object
    spec: Object
    process: int
    """PID of the container's program; 0: it has none of its own."""


class PodAccess:
    """Access to running containers. Safe from any thread."""

    def __init__(self, kubelet: Kubelet, deps: PodDependencies) -> None:
        self._kubelet = kubelet
        self._deps = deps

    def logs(self, request: LogRequest) -> Iterator[bytes]:
        """Yield the log of a container; of a mirror pod, that of its node. Raises StatusError."""
        if (mirror := self._mirror(request.namespace, request.pod)) is not None:
            return _node_log(self._deps.files.node_log(str(mirror["spec"]["nodeName"]), request.pod), request)
        lifecycle, facts = self._find(request.namespace, request.pod, request.container)
        number = facts.restarts - (1 if request.previous else 0)
        if request.previous and number < 0:
            why = f'previous terminated container "{facts.name}" in pod "{request.pod}" not found'
            raise StatusError(400, "BadRequest", why)
        run = lifecycle.runs.get(facts.name)
        if run is not None and run.container is None and not request.previous:
            return self._echo_log(lifecycle, facts, run, request)
        return self._program_log(lifecycle, facts, number, request)

    def _mirror(self, namespace: str, name: str) -> Object | None:
        """Return a mirror pod, None if the pod is none."""
        with self._deps.registry.held() as registry:
            pod = registry.get("Pod", namespace, name)
        return pod if pod is not None and is_mirror(pod) else None

    def _program_log(
        self, lifecycle: PodLifecycle, facts: ContainerFacts, number: int, request: LogRequest
    ) -> Iterator[bytes]:
        path = self._deps.files.log(lifecycle.pod, facts.name, number)
        run = lifecycle.runs.get(facts.name) or lifecycle.ended.get(facts.name)
        if run is not None and run.console is not None:
            run.console.forget_early()
        since = "" if request.since is None else log_time(int(request.since * 1e9))

        def is_over() -> bool:
            """Return True once this run of the container has ended, so that its log is complete."""
            return lifecycle.finished or facts.restarts != number or not isinstance(facts.state, Running)

        with LogReader(path, timestamps=request.timestamps, since=since) as reader:
            yield b"".join(reader.tail(request.tail))
            if request.follow and not request.previous:
                yield from _follow(lambda: b"".join(reader.more()), is_over)

    def _echo_log(
        self, lifecycle: PodLifecycle, facts: ContainerFacts, run: ContainerRun, request: LogRequest
    ) -> Iterator[bytes]:
        """Yield the requests that the echo server has answered, of which it remembers the last ones."""
        name = echo_name(lifecycle.pod, facts.name)
        last = (request.since or 0.0, "")

        def more(most: int | None = None) -> bytes:
            """Return the lines of the requests since the last call: the last `most` of them, or all without it."""
            nonlocal last
            new = [each for each in self._deps.echo.responses(name) if each > last]
            last = new[-1] if new else last
            shown = new if most is None else new[-most:] if most else []
            return b"".join(_line(each, request.timestamps) for each in shown)

        yield more(request.tail)
        if request.follow:
            yield from _follow(more, lambda: lifecycle.runs.get(facts.name) is not run)

    def node_logs(self, node: str) -> dict[str, Path]:
        """Return the logs of a node's own programs and of its pods, by their paths in /var/log of a node. Raises StatusError."""
        self._kubelet.node_namespace(node)
        found = self._deps.files.node_logs(node)
        for lifecycle in self._kubelet.pods():
            if lifecycle.pod["spec"].get("nodeName") == node:
                directory = f"pods/{lifecycle.key.namespace}_{lifecycle.key.name}_{lifecycle.uid}"
                logs = self._deps.files.logs(lifecycle.pod)
                found |= {f"{directory}/{path}": file for path, file in logs.items()}
        return found

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool
    ) -> ExecProcess:
        """Start a program in a container. Raises StatusError."""
        place = self._place(namespace, pod, container)
        environment = environment_of(place.pod, place.spec, self._deps.registry)
        ours, theirs = _terminal() if tty else _pipes(stdin)
        try:
            if place.process:
                entry = ExecSpec(target_pid=place.process, argv=tuple(argv), environment=environment, tty=tty)
                started = self._deps.containers.enter(entry, theirs)
            else:
                executable = find_program(argv[0], environment)
                program = program_in_pod(place.pod, place.spec, self._deps, argv, executable, environment)
                started = self._deps.containers.run(msgspec.structs.replace(program, tty=tty), theirs)
        except (ContainerStartError, OSError) as error:
            for handle in ours:
                os.close(handle)
            raise StatusError(500, "InternalError", f"unable to start {' '.join(argv)!r}: {error}") from error
        finally:
            for handle in set(theirs):
                os.close(handle)
        return ExecProcess(started, ours)

    def _place(self, namespace: str, pod: str, container: str) -> _ExecPlace:
        """Return where a command runs. Raises StatusError."""
        mirror = self._mirror(namespace, pod)
        if mirror is not None:
            self._kubelet.node_namespace(str(mirror["spec"]["nodeName"]))
            self._deps.files.write(mirror, ())
            return _ExecPlace(mirror, mirror["spec"]["containers"][0], 0)
        lifecycle, facts = self._find(namespace, pod, container)
        run = lifecycle.runs.get(facts.name)
        if run is None:
            raise StatusError(500, "InternalError", f"container not found ({facts.name!r})")
        process = run.container.pid if run.container is not None else 0
        return _ExecPlace(lifecycle.pod, lifecycle.specs[facts.name], process)

    def attach(
        self, namespace: str, pod: str, container: str, stdin: bool, stdout: bool, stderr: bool
    ) -> AttachedProcess:
        """Attach to the program of a container; without `stdin` and `tty` in its spec only to its output. Raises StatusError."""
        lifecycle, facts = self._find(namespace, pod, container)
        run = lifecycle.runs.get(facts.name) or lifecycle.ended.get(facts.name)
        if run is None:
            raise StatusError(500, "InternalError", f"container {facts.name} not found in pod {pod}")
        if run.console is not None:
            streams = [name for name, is_used in (("stdout", stdout), ("stderr", stderr)) if is_used]
            return AttachedProcess(run, stdin, {name: run.console.attach(name) for name in streams})
        request = LogRequest(namespace=namespace, pod=pod, container=facts.name, follow=True, tail=0)
        return AttachedProcess(run, False, {"stdout": _piped(self.logs(request))})

    def dial(self, node: str, host: str, port: int) -> socket.socket:
        """Connect from a node. Raises StatusError or OSError."""
        return dial_from(self._kubelet.node_namespace(node), host, port)

    def connect(self, namespace: str, pod: str, port: int) -> socket.socket:
        """Connect to a port of a pod on its loopback address. Raises StatusError or OSError."""
        lifecycle, _ = self._find(namespace, pod, "")
        try:
            return dial_from(lifecycle.namespace, "127.0.0.1", port)
        except OSError:
            return dial_from(lifecycle.namespace, "::1", port)

    def _find(self, namespace: str, pod: str, container: str) -> tuple[PodLifecycle, ContainerFacts]:
        lifecycle = self._kubelet.pod(ObjectKey(namespace, pod))
        if lifecycle is None:
            raise StatusError(404, "NotFound", f'pod "{pod}" runs on no node')
        if self._kubelet.on_dead_node(lifecycle):
            node = lifecycle.pod["spec"].get("nodeName")
            raise StatusError(500, "InternalError", f"the kubelet of {node} does not answer: the node is dead")
        for facts in lifecycle.facts.containers:
            if facts.name == container or (not container and not facts.init):
                if not facts.container_id:
                    reason = getattr(facts.state, "reason", "")
                    why = f'container "{facts.name}" in pod "{pod}" is waiting to start: {reason}'
                    raise StatusError(400, "BadRequest", why)
                return lifecycle, facts
        raise StatusError(400, "BadRequest", f"container {container} is not valid for pod {pod}")


class ExecProcess:
    """A program started with exec."""

    def __init__(self, container: RunningContainer, files: Sequence[int]) -> None:
        """Wrap a program. `files` are our ends of its standard files, or the master of its terminal."""
        self._container = container
        to, out, *err = files if len(files) == 3 else (os.dup(files[0]), files[0])
        self.stdin: BinaryIO | None = os.fdopen(to, "wb", buffering=0)
        self.stdout: BinaryIO | None = os.fdopen(out, "rb", buffering=0)
        self.stderr: BinaryIO | None = os.fdopen(err[0], "rb", buffering=0) if err else None

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        if self.stdout is not None and self.stderr is None:
            fcntl.ioctl(self.stdout, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        status = self._container.wait()
        return 137 if status is None else status

    def kill(self) -> None:
        """Kill the program if it still runs."""
        self._container.signal(9)


class AttachedProcess:
    """A client's view of a program that runs anyway."""

    def __init__(self, run: ContainerRun, stdin: bool, outputs: Mapping[str, int]) -> None:
        """Attach to a run of a container. `outputs` are files to read from, by stream."""
        self._run = run
        handle = run.console.input() if run.console is not None and stdin else None
        self.stdin: BinaryIO | None = os.fdopen(handle, "wb", buffering=0) if handle is not None else None
        files = {name: os.fdopen(each, "rb", buffering=0) for name, each in outputs.items()}
        self.stdout: BinaryIO | None = files.get("stdout")
        self.stderr: BinaryIO | None = files.get("stderr")

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        if self._run.console is not None:
            self._run.console.resize(rows, columns)

    def wait(self) -> int:
        """Return 0: clients find the program's exit status in the pod's."""
        if self._run.container is not None:
            self._run.container.wait(_END_SECONDS)
        return 0

    def kill(self) -> None:
        """Detach. The program goes on."""


def _piped(pieces: Iterator[bytes]) -> int:
    """Return the end of a pipe into which a thread writes pieces."""
    reader, writer = os.pipe()

    def pump() -> None:
        """Write all pieces, or as many as the reader takes, and close the pipe."""
        with contextlib.suppress(OSError), os.fdopen(writer, "wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)

    threading.Thread(target=pump, name="attach", daemon=True).start()
    return reader


def _terminal() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return our end of a terminal, and the program's three files."""
    master, slave = os.openpty()
    return (master,), (slave, slave, slave)


def _pipes(stdin: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return our ends of three pipes, and the program's. Without `stdin` the program reads end of file."""
    (its_in, to), (out, its_out), (err, its_err) = os.pipe(), os.pipe(), os.pipe()
    if not stdin:
        os.close(to)
        to = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    return (to, out, err), (its_in, its_out, its_err)


def _node_log(path: Path, request: LogRequest) -> Iterator[bytes]:
    """Yield the log of a node, whose lines have times of their own."""
    with path.open("rb") as file:
        lines = deque(file, maxlen=request.tail)
        yield b"".join(lines)
        if request.follow:
            yield from _follow(file.read, lambda: not path.exists())


def _follow(more: Callable[[], bytes], is_over: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what `more` returns until nothing follows, and an empty piece now and then to show that the log goes on."""
    idle_polls = 0
    while True:
        # Checked before reading, so that output before the end is not missed.
        over = is_over()
        new = more()
        if new:
            yield new
        elif over:
            return
        else:
            time.sleep(_POLL_SECONDS)
            idle_polls += 1
            if not idle_polls % _KEEPALIVE_POLLS:
                yield b""


def _line(said: tuple[float, str], timestamps: bool) -> bytes:
    moment, text = said
    return f"{log_time(int(moment * 1e9))} {text}\n".encode() if timestamps else f"{text}\n".encode()
