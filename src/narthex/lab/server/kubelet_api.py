"""Answers of a kubelet: logs, exec, attach, and port-forward of containers, and the log files of a node.

The lab's own API server calls it directly for `nodes/NAME/proxy`; an external one uses the listeners of `kubelet.py`. Paths and
parameters follow Kubernetes 1.36 (pkg/kubelet/server/server.go).
"""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.errors import StatusError
from narthex.lab.api.requests import ApiRequest, ExecRequest, LogRequest, PortForwardRequest, is_true
from narthex.lab.api.subresources import log_options
from narthex.lab.server.pod_requests import serve_from_pod
from narthex.lab.server.pods import PodRuntime
from narthex.runtime.http.connection import HttpConnection

_LOGS = "/logs"
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
_PATH = re.compile(r"/(containerLogs|exec|attach|portForward)/([^/]+)/([^/]+)(?:/([^/]+))?")


async def serve_kubelet(
    connection: HttpConnection, pods: PodRuntime | None, node: str, request: ApiRequest, path: str
) -> None:
    """Answer a request to the kubelet of a node, which may have another path at the API server. Raises StatusError."""
    if path == "/healthz":
        await connection.respond(200, b"ok", _TEXT)
    elif f"{path}/".startswith(f"{_LOGS}/"):
        files = pods.node_logs(node) if pods is not None else {}
        await _serve_log_file(connection, files, path)
    else:
        request = msgspec.structs.replace(request, path=path)
        await serve_from_pod(connection, pods, request, kubelet_request(request, time.time))


async def _serve_log_file(connection: HttpConnection, files: Mapping[str, Path], path: str) -> None:
    """Send a file, or a page with the names in a directory, as Go's file server does. Raises StatusError."""
    name = path.removeprefix(_LOGS).lstrip("/")
    if name in files:
        try:
            content = await asyncio.to_thread(files[name].read_bytes)
        except OSError:
            raise _not_found() from None
        await connection.respond(200, content, _TEXT)
        return
    directory = f"{name.rstrip('/')}/" if name else ""
    inside = [each.removeprefix(directory) for each in files if each.startswith(directory)]
    if not inside and directory:
        raise _not_found()
    if not path.endswith("/"):
        await connection.respond(301, b"", (("Location", f"{path.rpartition('/')[2]}/"),))
        return
    names = sorted({first + slash for first, slash, _ in (each.partition("/") for each in inside)})
    links = "".join(f'<a href="{quote(each)}">{html.escape(each)}</a>\n' for each in names)
    page = f"<!doctype html>\n<pre>\n{links}</pre>\n"
    await connection.respond(200, page.encode(), (("Content-Type", "text/html; charset=utf-8"),))


def _not_found() -> StatusError:
    return StatusError(404, "NotFound", "404 page not found")


def kubelet_request(request: ApiRequest, wall: Callable[[], float]) -> LogRequest | ExecRequest | PortForwardRequest:
    """Return what a path of the kubelet's API asks for. `wall` returns seconds since 1970. Raises StatusError."""
    found = _PATH.fullmatch(request.path)
    if found is None or (found[1] != "portForward" and not found[4]):
        raise _not_found()
    action, namespace, pod, container = found.groups()
    if action == "portForward":
        return PortForwardRequest(namespace=namespace, pod=pod)
    if action == "containerLogs":
        return log_options(namespace, pod, container, request.query, wall)
    argv = tuple(request.all("command"))
    if action == "exec" and not argv:
        raise errors.bad_request("you must specify at least 1 command for the container")
    tty = is_true(request.query, "tty")
    return ExecRequest(
        namespace=namespace,
        pod=pod,
        container=container,
        argv=argv if action == "exec" else (),
        stdin=is_true(request.query, "input"),
        stdout=is_true(request.query, "output"),
        stderr=is_true(request.query, "error") and not tty,
        tty=tty,
    )
