"""Tokens from an exec credential plugin, a program that a kubeconfig names.

A plugin is a foreign program that may hang, start other programs, and print anything. It runs at most once at a time in
this process, whichever clients wait for its token; it has a time limit; and it ends with this process.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import lru_cache

import httpx2
import msgspec
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError

from narthex.linux.run import CommandError, TimeoutExpired
from narthex.linux.supervised import run_supervised
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
