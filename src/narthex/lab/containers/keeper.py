"""The keeper: a process that starts a container's program, writes its log, forwards signals, and reports its end.

It exchanges lines of JSON (KeeperReport, KeeperRequest) with the owner on a socket. When that socket closes, the container ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import signal
import socket
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from narthex.lab.containers.cgroups import join_cgroup
from narthex.lab.containers.log import LogWriter
from narthex.lab.containers.program import (
    NEW_PROCESSES,
    ExecSpec,
    ProgramSpec,
    become,
    become_exec,
    find_program,
    join_network,
    join_process,
    join_processes,
    unshare,
)
from narthex.linux.processes import die_with_parent

_CHUNK = 64 * 1024


class KeeperReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A report: the program runs, could not be started, or has ended."""

    pid: int = 0
    """Process ID of the program in the machine's PID namespace."""
    failed: str = ""
    """Why the program could not be started."""
    missing: bool = False
    status: int | None = None
    """Exit status, or 128 and the signal's number. None while the program runs."""
    signal: int = 0
    """Signal that ended the program."""


class KeeperRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request to the keeper."""

    signal: int = 0


KEEPER_REPORTS = msgspec.json.Decoder(KeeperReport)
_REQUESTS = msgspec.json.Decoder(KeeperRequest)
_PROGRAMS, _ENTRIES = msgspec.json.Decoder(ProgramSpec), msgspec.json.Decoder(ExecSpec)


def keep_program(control: socket.socket, order: bytes, files: Sequence[int]) -> NoReturn:
    """Run a ProgramSpec (JSON) in namespaces of its own. `files` are its three standard files, unless it has a log."""
    program = _PROGRAMS.decode(order)
    log: LogWriter | None = None
    streams: dict[int, str] = {}
    try:
        join_network(program.network_namespace)
        join_cgroup(program.cgroup)
        if program.log:
            log = LogWriter(program.log)
            (out, its_out), (err, its_err) = os.pipe(), os.pipe()
            streams = {out: "stdout", err: "stderr"}
            files = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), its_out, its_err]
        if program.process_namespace:
            join_processes(program.process_namespace)
        else:
            unshare(NEW_PROCESSES)
        child = _start(lambda: become(program, files))
    except OSError as error:
        _fail(control, error)
    _keep(control, child, files, log, streams)


def keep_entry(control: socket.socket, order: bytes, files: Sequence[int]) -> NoReturn:
    """Run an ExecSpec (JSON) in a container's namespaces, with three standard files."""
    entry = _ENTRIES.decode(order)
    try:
        join_process(entry.target_pid)
        executable = find_program(entry.argv[0], entry.environment, entry.directory)
        child = _start(lambda: become_exec(entry, executable, files))
    except OSError as error:
        _fail(control, error)
    _keep(control, child, files, None, {})


def keep_pause(control: socket.socket, _order: bytes, _files: Sequence[int]) -> NoReturn:
    """Hold a PID namespace for several programs: its first process only reaps the others."""
    try:
        unshare(NEW_PROCESSES)
    except OSError as error:
        _fail(control, error)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        control.close()
        die_with_parent(lambda: not _closed(writer))
        _reap()
    os.close(writer)
    _keep(control, child, (), None, {})


def _reap() -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            signal.sigwait({signal.SIGCHLD})


def _start(run: Callable[[], NoReturn]) -> int:
    """Fork, call `run` in the child, and return its process ID once it runs. Raises OSError with what prevented it."""
    # `exec` closes the pipe; before that, only an error is written to it.
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            die_with_parent(lambda: not _closed(writer))
            run()
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) and error.errno else 0
            with contextlib.suppress(OSError):
                os.write(writer, f"{number} {_words(error)}".encode(errors="replace"))
        os._exit(127)
    os.close(writer)
    output = b""
    while part := os.read(reader, _CHUNK):
        output += part
    os.close(reader)
    if output:
        os.waitpid(child, 0)
        code, _, text = output.decode(errors="replace").partition(" ")
        raise OSError(int(code), text)
    return child


def _closed(writer: int) -> bool:
    poll = select.poll()
    poll.register(writer, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _words(error: BaseException) -> str:
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return f"{text} ({error.filename})" if error.filename else text
    return f"{type(error).__name__}: {error}"


def _fail(control: socket.socket, error: OSError) -> NoReturn:
    missing = error.errno in (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR)
    _send_report(control, KeeperReport(failed=_words(error), missing=missing))
    os._exit(0)


def _send_report(control: socket.socket, report: KeeperReport) -> None:
    with contextlib.suppress(OSError):
        control.sendall(msgspec.json.encode(report) + b"\n")


def _keep(
    control: socket.socket, child: int, files: Sequence[int], log: LogWriter | None, streams: dict[int, str]
) -> NoReturn:
    for handle in files:
        os.close(handle)
    _send_report(control, KeeperReport(pid=child))
    ended = os.pidfd_open(child)
    with selectors.DefaultSelector() as selector:
        for handle in (control.fileno(), ended, *streams):
            selector.register(handle, selectors.EVENT_READ)
        pending = b""
        running = True
        while running or streams:
            for key, _ in selector.select():
                if key.fd in streams:
                    output = os.read(key.fd, _CHUNK)
                    if output and log is not None:
                        log.take(streams[key.fd], output)
                    elif not output:
                        selector.unregister(key.fd)
                        del streams[key.fd]
                elif key.fd == ended:
                    running = False
                    selector.unregister(ended)
                else:
                    data = control.recv(_CHUNK)
                    if not data:
                        # The owner is gone. When its first process ends, the kernel ends the whole PID namespace.
                        os.kill(child, signal.SIGKILL)
                        selector.unregister(control.fileno())
                        continue
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        number = _REQUESTS.decode(line).signal
                        if running and number:
                            os.kill(child, number)
    if log is not None:
        log.close()
    _, status = os.waitpid(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    _send_report(control, KeeperReport(status=128 + number if number else os.WEXITSTATUS(status), signal=number))
    os._exit(0)
