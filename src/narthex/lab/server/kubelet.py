"""The kubelets' API: logs, exec, attach, and port-forward of containers, and the log files of a node.

The lab's own API server calls it directly for `nodes/NAME/proxy`. For an external one each node has a listener on its addresses; a
client must have the certificate of the API server. Paths and parameters follow Kubernetes 1.36 (pkg/kubelet/server/server.go).
"""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec

from narthex.lab.api import errors
from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.proxy_path import KUBELET_PORT
from narthex.lab.api.requests import ApiRequest, ExecRequest, LogRequest, PortForwardRequest, is_true
from narthex.lab.api.subresources import log_options
from narthex.lab.program.state import StateDirectory
from narthex.lab.server.certificate import Certificate
from narthex.lab.server.pods import PodRuntime
from narthex.lab.server.server import LIMITS, api_request, serve_from_pod
from narthex.lab.topology import LabNode
from narthex.linux.namespaces import in_namespace
from narthex.runtime.http.connection import HttpConnection, MalformedRequest
from narthex.runtime.http.server import HttpServer, listen_tcp

_CONNECTIONS = 4096
"""Each exec and each followed log of the cluster has one."""
_LOGS = "/logs"
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)
_PATH = re.compile(r"/(containerLogs|exec|attach|portForward)/([^/]+)/([^/]+)(?:/([^/]+))?")


class KubeletServer:
    """The API of all kubelets of a lab. Its methods may be called from any thread."""

    def __init__(self, directory: StateDirectory, nodes: Iterable[LabNode], pods: PodRuntime) -> None:
        self._directory = directory
        self._nodes = tuple(nodes)
        self._pods = pods
        self._http = HttpServer("kubelet-api", _CONNECTIONS)

    def start(self) -> None:
        """Listen on all nodes. Raises OSError."""
        directory = self._directory
        made = Certificate(directory.certificate.read_text(), directory.key.read_text())
        context = made.context(directory.control_plane.kubelet_client.read_text())
        for node in self._nodes:
            with in_namespace(node.namespace):
                sock = listen_tcp("::", KUBELET_PORT, both_families=True)
            serve = partial(self._serve, node=node.name)
            self._http.serve(sock, _connection, serve, (_CONNECTIONS, _CONNECTIONS), context)

    async def _serve(self, connection: HttpConnection, node: str) -> None:
        try:
            while (received := await connection.request()) is not None:
                request = api_request(received)
                try:
                    await serve_kubelet(connection, self._pods, node, request, request.path)
                except StatusError as fault:
                    await connection.respond(fault.code, fault.message.encode(), _TEXT)
                if not connection.framing.persistent:
                    await connection.close()
                    return
        except MalformedRequest as error:
            reply = error_response(StatusError(error.status, "BadRequest", str(error)))
            await connection.respond(reply.status, reply.body, (("Connection", "close"),))
            await connection.close()


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


def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpConnection:
    return HttpConnection(reader, writer, LIMITS)
