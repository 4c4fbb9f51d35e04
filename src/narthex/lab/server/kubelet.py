"""The kubelets' API, by which an external API server reaches containers: logs, exec, attach, and port-forward.

Each node has a listener on its addresses. A client must have the certificate of the API server. Paths and parameters follow
Kubernetes 1.36 (pkg/kubelet/server/server.go).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable

from narthex.lab.api import errors
from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
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

PORT = 10250
_CONNECTIONS = 4096
"""Each exec and each followed log of the cluster has one."""
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
                sock = listen_tcp("::", PORT, both_families=True)
            self._http.serve(sock, _connection, self._serve, (_CONNECTIONS, _CONNECTIONS), context)

    async def _serve(self, connection: HttpConnection) -> None:
        try:
            while (received := await connection.request()) is not None:
                request = api_request(received)
                try:
                    if request.path == "/healthz":
                        await connection.respond(200, b"ok", (("Content-Type", "text/plain"),))
                    else:
                        await serve_from_pod(connection, self._pods, request, kubelet_request(request, time.time))
                except StatusError as fault:
                    await connection.respond(fault.code, fault.message.encode(), (("Content-Type", "text/plain"),))
                if not connection.framing.persistent:
                    await connection.close()
                    return
        except MalformedRequest as error:
            reply = error_response(StatusError(error.status, "BadRequest", str(error)))
            await connection.respond(reply.status, reply.body, (("Connection", "close"),))
            await connection.close()


def kubelet_request(request: ApiRequest, wall: Callable[[], float]) -> LogRequest | ExecRequest | PortForwardRequest:
    """Return what a path of the kubelet's API asks for. `wall` returns seconds since 1970. Raises StatusError."""
    found = _PATH.fullmatch(request.path)
    if found is None or (found[1] != "portForward" and not found[4]):
        raise StatusError(404, "NotFound", "404 page not found")
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
