"""The listeners of the kubelets' API, by which an external API server reaches containers (`kubelet_api.py`).

Each node has one on its addresses. A client must have the certificate of the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.proxy_path import KUBELET_PORT
from narthex.lab.program.state import StateDirectory
from narthex.lab.server.certificate import Certificate
from narthex.lab.server.kubelet_api import serve_kubelet
from narthex.lab.server.pods import PodRuntime
from narthex.lab.server.server import LIMITS, api_request
from narthex.lab.topology import LabNode
from narthex.linux.namespaces import in_namespace
from narthex.runtime.connection_slots import SlotLimits
from narthex.runtime.http.connection import HttpConnection, MalformedRequest
from narthex.runtime.http.server import HttpServer, listen_tcp

_CONNECTIONS = 4096
"""Each exec and each followed log of the cluster has one."""


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
            self._http.serve(sock, _connection, serve, SlotLimits(_CONNECTIONS, _CONNECTIONS), context)

    async def _serve(self, connection: HttpConnection, node: str) -> None:
        try:
            while (received := await connection.request()) is not None:
                request = api_request(received)
                try:
                    await serve_kubelet(connection, self._pods, node, request, request.path)
                except StatusError as fault:
                    await connection.respond(fault.code, fault.message.encode(), (("Content-Type", "text/plain"),))
                if not connection.framing.persistent:
                    await connection.close()
                    return
        except MalformedRequest as error:
            reply = error_response(StatusError(error.status, "BadRequest", str(error)))
            await connection.respond(reply.status, reply.body, (("Connection", "close"),))
            await connection.close()


def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpConnection:
    return HttpConnection(reader, writer, LIMITS)
