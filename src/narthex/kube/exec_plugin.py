"""Tokens from an exec credential plugin, a program that a kubeconfig names.

A plugin is a foreign program that may hang, start other programs, and print anything. It runs at most once at a time in
this process, whichever clients wait for its token; it has a time limit; and it ends with this process, with all that it started.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

import httpx2
import msgspec
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

from narthex.linux.run import CommandError, StartedProgram, TimeoutExpired
from narthex.model import quoted

PLUGIN_SECONDS = 30.0
"""A plugin may ask a person's identity provider, which takes seconds. One that takes longer hangs."""
_PLUGINS = 16
"""Plugins that are remembered: a process uses one or two, and another one after its kubeconfig changed."""
_POLL_SECONDS = 0.05


class PluginError(ConfigError):
    """A plugin gave no token; the message states the reason."""


class _Status(msgspec.Struct):
    token: str | None = None


class _Credential(msgspec.Struct):
    status: _Status | None = None


_CREDENTIALS = msgspec.json.Decoder(_Credential)


class ExecPlugin:
    """One plugin and its last token. Safe from any thread."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], seconds: float = PLUGIN_SECONDS) -> None:
        """Prepare a plugin. `environment` is added to that of this process."""
        self._argv = tuple(argv)
        self._environment = dict(environment)
        self._seconds = seconds
        self._running = threading.Lock()
        self._token = ""
        self._error = ""
        self._ended_at = -1.0

    async def token(self, refused: str = "") -> str:
        """Return a token; run the plugin if there is none but the `refused` one. Raises PluginError."""
        asked_at = time.monotonic()
        # Other clients may wait in other threads, each with an event loop of its own.
        while not self._running.acquire(blocking=False):
            await asyncio.sleep(_POLL_SECONDS)
        try:
            if self._token and self._token != refused:
                return self._token
            if self._error and self._ended_at > asked_at:
                # It failed while this client waited.
                raise PluginError(self._error)
            self._token, self._error = "", "was interrupted"
            try:
                self._token = await self._run()
                self._error = ""
            except PluginError as error:
                self._error = str(error)
                raise
            finally:
                self._ended_at = time.monotonic()
            return self._token
        finally:
            self._running.release()

    async def _run(self) -> str:
        name = f"exec plugin {self._argv[0]}"
        try:
            output = await run_supervised(self._argv, {**os.environ, **self._environment}, timeout=self._seconds)
        except CommandError as error:
            raise PluginError(f"{name}: exit status {error.status}: {quoted(error.said.strip(), 300)}") from error
        except TimeoutExpired as error:
            raise PluginError(f"{name} did not end within {self._seconds:g} s, so it was killed") from error
        except OSError as error:
            raise PluginError(f"{name} cannot be started: {error.strerror or error}") from error
        try:
            status = _CREDENTIALS.decode(output).status
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise PluginError(f"{name} printed no ExecCredential: {error}") from error
        if status is None or not status.token:
            raise PluginError(f"{name} printed an ExecCredential without status.token")
        if not (status.token.isascii() and status.token.isprintable()):
            raise PluginError(f"{name} printed a token that no HTTP header can hold")
        return status.token


class ExecAuth(httpx2.Auth):
    """Adds the token of a plugin to requests, and asks for another one if the server refuses it."""

    def __init__(self, plugin: ExecPlugin) -> None:
        self._plugin = plugin

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Yield the request with a token, and once more with another token if it gets status 401."""
        token = await self._plugin.token()
        request.headers["Authorization"] = f"Bearer {token}"
        response = yield request
        if response.status_code == 401:
            request.headers["Authorization"] = f"Bearer {await self._plugin.token(refused=token)}"
            yield request


def exec_auth(plugin: UserExec) -> ExecAuth:
    """Return the authentication by a plugin. All clients of this process share the plugin and its token."""
    environment = tuple((each.name, each.value) for each in plugin.env or ())
    return ExecAuth(_shared((plugin.command, *(plugin.args or ())), environment))


@lru_cache(maxsize=_PLUGINS)
def _shared(argv: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> ExecPlugin:
    return ExecPlugin(argv, dict(environment))


MOST_OUTPUT = 1 << 20
"""Bytes that a program may print: answers are some kilobytes long."""
_LOOK_SECONDS = 0.05
"""Interval at which the length of the output is looked at."""
_KILL_SECONDS = 5.0
"""Time for the supervisor to kill the program, which takes milliseconds; then it is killed itself."""

_SUPERVISOR = """
import os, select, signal, sys
program = os.fork()
if program == 0:
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(sys.argv[1], sys.argv[1:])
    except OSError as error:
        os.write(2, f"cannot be started: {error.strerror}".encode())
        os._exit(127)
try:
    os.setpgid(program, program)
except OSError:
    pass
select.select([0, os.pidfd_open(program)], [], [])
os.killpg(program, signal.SIGKILL)
_, status = os.waitpid(program, 0)
os._exit(os.waitstatus_to_exitcode(status) % 256)
"""
"""Runs a program in a process group of its own, and kills the group when the program or its standard input ends.

A signal of the kernel at the end of the parent would reach only the program, not those that it started.
"""


async def run_supervised(argv: Sequence[str], environment: Mapping[str, str], *, timeout: float) -> bytes:
    """Run a foreign program and return its output. Nothing of its process group is left afterwards.

    This also holds if the call is cancelled, or this process is killed. Raises CommandError if the program fails or
    prints more than `MOST_OUTPUT` bytes, TimeoutExpired after `timeout` seconds, and OSError if there are no resources.
    """
    printed, complained = os.memfd_create("printed"), os.memfd_create("complained")
    reading, lifeline = os.pipe()
    try:
        # Through a pipe, a program that leaves another one behind would keep its readers waiting.
        supervisor = subprocess.Popen(
            [sys.executable, "-ISc", _SUPERVISOR, *argv],
            stdin=reading,
            stdout=printed,
            stderr=complained,
            env=dict(environment),
            process_group=0,
        )
        try:
            await _end_of(supervisor, argv, (printed, complained), timeout)
        finally:
            _stop(supervisor, lifeline)
        if supervisor.returncode != 0:
            raise CommandError(argv[:1], supervisor.returncode, _text(complained) or _text(printed))
        return os.pread(printed, MOST_OUTPUT, 0)
    finally:
        for file in (printed, complained, reading, lifeline):
            os.close(file)


async def _end_of(
    supervisor: StartedProgram[bytes], argv: Sequence[str], outputs: tuple[int, ...], timeout: float
) -> None:
    """Wait for the end of the program. Raises CommandError and TimeoutExpired."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    process = os.pidfd_open(supervisor.pid)
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(timeout):
            while not ended.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_SECONDS):
                        await ended.wait()
                if any(os.fstat(file).st_size > MOST_OUTPUT for file in outputs):
                    raise CommandError(argv[:1], 1, f"it printed more than {MOST_OUTPUT} bytes")
    except TimeoutError as error:
        raise TimeoutExpired(list(argv), timeout) from error
    finally:
        loop.remove_reader(process)
        os.close(process)


def _stop(supervisor: StartedProgram[bytes], lifeline: int) -> None:
    """Have the program killed, unless it has ended, and wait for the supervisor."""
    with suppress(BrokenPipeError):
        os.write(lifeline, b"\n")
    try:
        supervisor.wait(_KILL_SECONDS)
    except TimeoutExpired:
        supervisor.kill()
        supervisor.wait()


def _text(file: int) -> str:
    return os.pread(file, MOST_OUTPUT, 0).decode("utf-8", "replace")
