"""A client of an external API server, for any thread of a lab's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import msgspec

from narthex.kube.access import access_to
from narthex.kube.client import ApiClient, Unreachable
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.requests import JSON, ApiResponse
from narthex.lab.api.store import Raw
from narthex.linux.namespaces import in_namespace

_REQUEST_SECONDS = 15.0
"""Time for one request. A busy server answers within seconds; who waits longer holds up the pods of a node."""
RAW_OBJECTS = msgspec.json.Decoder(Raw)


class RemoteClient:
    """Requests to the API server from any thread. They leave from the lab's network."""

    def __init__(self, namespace: str | None, kubeconfig: str) -> None:
        """Prepare a client. `namespace` is the network namespace to send from; None: the present one."""
        self.access = access_to(kubeconfig, qps=-1.0)
        self.namespace = namespace
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = asyncio.Event()
        self._api = ApiClient(self.access)

    def start(self) -> None:
        """Start the thread that sends the requests."""
        ready = threading.Event()

        def serve() -> None:
            """Run the client's event loop in its network namespace."""
            with in_namespace(self.namespace):
                asyncio.run(self._serve(ready))

        self._thread = threading.Thread(target=serve, name="api-client", daemon=True)
        self._thread.start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        async with contextlib.aclosing(self._api):
            ready.set()
            await self._ended.wait()

    def close(self) -> None:
        """Close all connections and end the thread."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()

    def request(self, method: str, path: str, body: object = None, content_type: str = JSON) -> ApiResponse:
        """Send a request and return the response. Raises StatusError without one."""
        data = body if isinstance(body, bytes) or body is None else msgspec.json.encode(body)
        assert self._loop is not None
        sending = asyncio.run_coroutine_threadsafe(self._exchange(method, path, data, content_type), self._loop)
        try:
            code, answer = sending.result()
        except (Unreachable, TimeoutError) as error:
            why = str(error) or f"no response within {_REQUEST_SECONDS:.0f} s"
            raise StatusError(503, "ServiceUnavailable", f"{method} {path}: {why}") from error
        return ApiResponse(code, answer)

    def object(self, method: str, path: str, body: object = None, content_type: str = JSON) -> Raw:
        """Send a request and return the object in the response. Raises StatusError, also for an error of the server."""
        response = self.request(method, path, body, content_type)
        answer: Raw = RAW_OBJECTS.decode(response.body)
        if response.status >= 300:
            reason, message = str(answer.get("reason") or ""), str(answer.get("message") or f"{method} {path}")
            raise StatusError(response.status, reason, message, answer.get("details"))
        return answer

    async def _exchange(self, method: str, path: str, data: bytes | None, content_type: str) -> tuple[int, bytes]:
        async with asyncio.timeout(_REQUEST_SECONDS):
            return await self._api.exchange(method, path, data, content_type)


def discovered_resources(client: RemoteClient) -> Iterator[ApiResource]:
    """Yield the kinds of all groups, in the preferred version of each."""
    groups: list[tuple[str, str, tuple[str, ...]]] = [("", "v1", ("v1",))]
    for group in client.object("GET", "/apis").get("groups") or ():
        versions = tuple(each["version"] for each in group["versions"])
        groups.append((group["name"], group["preferredVersion"]["version"], versions))
    for name, version, versions in groups:
        root = f"/apis/{name}/{version}" if name else f"/api/{version}"
        for each in client.object("GET", root).get("resources") or ():
            if "/" not in each["name"]:
                yield ApiResource(
                    kind=each["kind"],
                    group=name,
                    version=version,
                    plural=each["name"],
                    namespaced=bool(each.get("namespaced")),
                    served=versions,
                )
