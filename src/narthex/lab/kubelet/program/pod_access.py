"""Logs and exec for the API server."""

from __future__ import annotations

import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import BinaryIO

from narthex.lab.api.errors import StatusError
from narthex.lab.containers.container import ContainerStartError, RunningContainer
from narthex.lab.containers.inside import find
from narthex.lab.containers.log import LogReader
from narthex.lab.containers.program import ExecSpec, ProgramSpec
from narthex.lab.kubelet.environment import hostname
from narthex.lab.kubelet.program.containers import ContainerRun, PodDependencies, echo_name, environment_of
from narthex.lab.kubelet.program.kubelet import Kubelet
from narthex.lab.kubelet.program.pod import PodLifecycle
from narthex.lab.kubelet.status import ContainerFacts, Running
from narthex.model.objects import NamespacedName

_POLL_SECONDS = 0.1
_KEEPALIVE_POLLS = 5


class PodAccess:
    """Access to running containers. Safe from any thread."""

    def __init__(self, kubelet: Kubelet, deps: PodDependencies) -> None:
        self._kubelet = kubelet
        self._files = deps.files
        self._containers = deps.containers
        self._echo = deps.echo
        self._registry = deps.registry

    def logs(
        self,
        namespace: str,
        pod: str,
        container: str,
        tail: int | None,
        follow: bool,
        since: float | None,
        previous: bool,
        timestamps: bool,
    ) -> Iterator[bytes]:
        """Yield the log of a container. Raises StatusError."""
        lifecycle, facts = self._find(namespace, pod, container)
        number = facts.restarts - (1 if previous else 0)
        if previous and number < 0:
            why = f'previous terminated container "{facts.name}" in pod "{pod}" not found'
            raise StatusError(400, "BadRequest", why)
        run = lifecycle.runs.get(facts.name)
        if run is not None and run.container is None and not previous:
            return self._echo_log(lifecycle, facts, run, tail, follow, since, timestamps)
        path = self._files.log(lifecycle.pod, facts.name, number)
        reader = LogReader(path, timestamps=timestamps, since=_stamp(since) if since is not None else "")
        return self._program_log(lifecycle, facts, number, reader, tail, follow and not previous)

    def _program_log(
        self,
        lifecycle: PodLifecycle,
        facts: ContainerFacts,
        number: int,
        log: LogReader,
        tail: int | None,
        follow: bool,
    ) -> Iterator[bytes]:
        with log as reader:
            yield b"".join(reader.tail(tail))
            idle_polls = 0
            while follow:
                # Checked before reading, so that output before the end is not missed.
                over = lifecycle.finished or facts.restarts != number or not isinstance(facts.state, Running)
                new = b"".join(reader.more())
                if new:
                    yield new
                elif over:
                    return
                else:
                    time.sleep(_POLL_SECONDS)
                    idle_polls += 1
                    if not idle_polls % _KEEPALIVE_POLLS:
                        yield b""

    def _echo_log(
        self,
        lifecycle: PodLifecycle,
        facts: ContainerFacts,
        run: ContainerRun,
        tail: int | None,
        follow: bool,
        since: float | None,
        timestamps: bool,
    ) -> Iterator[bytes]:
        """Yield the requests that the echo server has answered, of which it remembers the last ones."""
        name = echo_name(lifecycle.pod, facts.name)
        answers = [each for each in self._echo.responses(name) if since is None or each[0] >= since]
        lines_of_tail = answers if tail is None else answers[-tail:] if tail else []
        yield b"".join(_line(each, timestamps) for each in lines_of_tail)
        last, idle_polls = (answers[-1] if answers else (0.0, "")), 0
        while follow and lifecycle.runs.get(facts.name) is run:
            new = [each for each in self._echo.responses(name) if each > last]
            if new:
                last = new[-1]
                yield b"".join(_line(each, timestamps) for each in new)
            time.sleep(_POLL_SECONDS)
            idle_polls += 1
            if not idle_polls % _KEEPALIVE_POLLS:
                yield b""

    def exec(
        self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool
    ) -> ExecProcess:
        """Start a program in a container. Raises StatusError."""
        lifecycle, facts = self._find(namespace, pod, container)
        run = lifecycle.runs.get(facts.name)
        if run is None:
            raise StatusError(500, "InternalError", f"container not found ({facts.name!r})")
        environment = environment_of(lifecycle.pod, lifecycle.specs[facts.name], self._registry)
        ours, theirs = _terminal() if tty else _pipes(stdin)
        try:
            if run.container is not None:
                entry = ExecSpec(target_pid=run.container.pid, argv=tuple(argv), environment=environment, tty=tty)
                started = self._containers.enter(entry, theirs)
            else:
                started = self._containers.run(
                    self._program_in_echo_pod(lifecycle, facts, argv, environment, tty), theirs
                )
        except (ContainerStartError, OSError) as error:
            for handle in ours:
                os.close(handle)
            raise StatusError(500, "InternalError", f"unable to start {' '.join(argv)!r}: {error}") from error
        finally:
            for handle in set(theirs):
                os.close(handle)
        return ExecProcess(started, ours, tty=tty)

    def _program_in_echo_pod(
        self,
        lifecycle: PodLifecycle,
        facts: ContainerFacts,
        argv: Sequence[str],
        environment: dict[str, str],
        tty: bool,
    ) -> ProgramSpec:
        """Return a program with namespaces like those of the pod, in which no program runs."""
        spec = lifecycle.specs[facts.name]
        return ProgramSpec(
            argv=tuple(argv),
            executable=find(argv[0], environment),
            environment=environment,
            network_namespace=lifecycle.namespace,
            hostname="" if lifecycle.pod["spec"].get("hostNetwork") else hostname(lifecycle.pod),
            shows=tuple(self._files.mounts(lifecycle.pod, spec)),
            tty=tty,
        )

    def _find(self, namespace: str, pod: str, container: str) -> tuple[PodLifecycle, ContainerFacts]:
        lifecycle = self._kubelet.pod(NamespacedName(namespace, pod))
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

    def __init__(self, container: RunningContainer, files: Sequence[int], *, tty: bool) -> None:
        self._container = container
        self.stdin: BinaryIO | None = None
        self.stderr: BinaryIO | None = None
        if tty:
            (master,) = files
            self.stdout: BinaryIO | None = os.fdopen(master, "rb", buffering=0)
            self.stdin = os.fdopen(os.dup(master), "wb", buffering=0)
            return
        to, out, err = files
        self.stdin = os.fdopen(to, "wb", buffering=0)
        self.stdout = os.fdopen(out, "rb", buffering=0)
        self.stderr = os.fdopen(err, "rb", buffering=0)

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


def _line(said: tuple[float, str], timestamps: bool) -> bytes:
    moment, text = said
    return f"{_stamp(moment)} {text}\n".encode() if timestamps else f"{text}\n".encode()


def _stamp(moment: float) -> str:
    """Format a time as in log files."""
    seconds, rest = divmod(int(moment * 1e9), 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"
