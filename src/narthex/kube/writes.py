"""Writes to the API server: one request and one response each, without retries.

    async with writing(access) as writer:
        node = await writer.get("/api/v1/nodes/a")
        await writer.patch("/api/v1/nodes/a", {"metadata": {"annotations": {...}}})

`metadata.resourceVersion` in a body is a precondition: if the object has another version, the server answers 409 and
`ConflictError` is raised.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable
from narthex.kube.messages import ApiStatus, read_status
from narthex.model.problem import quoted

JsonObject = dict[str, Any]
"""An object as JSON."""
PatchKind = Literal["merge", "strategic", "json"]

_PATCHES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}
_JSON = "application/json"
_LONGEST_SAID = 400
"""Characters of the server's message to keep. The missing permission is named at its end."""
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiError(Exception):
    """A write failed, or its result is unknown (NoResponseError). The message names the object and what to do."""

    def __init__(self, code: int, method: str, path: str, why: str) -> None:
        super().__init__(f"{method} {path}: {why}")
        self.code = code
        """HTTP status; 0 without a response."""
        self.path = path


class NoResponseError(ApiError):
    """The server did not respond; the write may have succeeded."""


class ConflictError(ApiError):
    """The object has changed since the given version: read it again and decide anew."""


class AlreadyExistsError(ApiError):
    """An object with this name exists already."""


class NotFoundError(ApiError):
    """The object or its kind does not exist."""


class ApiWriter:
    """Reads and writes objects by full path, such as `/api/v1/namespaces/shop/services/web`."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def get(self, path: str) -> JsonObject:
        """Return the object. Raises ApiError, as all methods do."""
        return await self._request("GET", path)

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object with POST to the collection's path; return the stored object. Raises AlreadyExistsError."""
        return await self._request("POST", path, body, _JSON)

    async def update(self, path: str, body: JsonObject, *, subresource: str = "") -> JsonObject:
        """Replace the whole object with PUT; return the stored object. Raises ConflictError."""
        return await self._request("PUT", _below(path, subresource), body, _JSON)

    async def patch(
        self, path: str, body: JsonObject | list[JsonObject], *, kind: PatchKind = "merge", subresource: str = ""
    ) -> JsonObject:
        """Change parts of an object; return the stored object. `kind` json takes a list of operations.

        Raises ConflictError.
        """
        return await self._request("PATCH", _below(path, subresource), body, _PATCHES[kind])

    async def delete(self, path: str) -> None:
        """Delete an object. Raises NotFoundError."""
        await self._request("DELETE", path)

    async def _request(
        self, method: str, path: str, body: JsonObject | list[JsonObject] | None = None, type: str = ""
    ) -> JsonObject:
        data = msgspec.json.encode(body) if body is not None else None
        try:
            code, said = await self._api.exchange(method, path, data, type)
        except Unreachable as error:
            raise NoResponseError(0, method, path, f"{error}; it will be retried") from error
        if 200 <= code < 300:
            try:
                answer = msgspec.json.decode(said)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise NoResponseError(
                    code, method, path, f"status {code}, but the body is not JSON: {error}"
                ) from error
            return answer if isinstance(answer, dict) else {}
        raise _refusal(code, method, path, read_status(said, code))


@asynccontextmanager
async def writing(access: Access) -> AsyncIterator[ApiWriter]:
    """Open a writer with connections of its own while the block runs."""
    api = ApiClient(access)
    try:
        yield ApiWriter(api)
    finally:
        await api.close()


def _below(path: str, subresource: str) -> str:
    return f"{path}/{subresource}" if subresource else path


def _refusal(code: int, method: str, path: str, status: ApiStatus) -> ApiError:
    said = f"status {code}" + (f" {status.reason}" if status.reason else "")
    said += f": {quoted(status.message, _LONGEST_SAID)}" if status.message else ""
    if code == 409:
        if status.reason == "AlreadyExists":
            return AlreadyExistsError(code, method, path, f"{said}; it is there already")
        return ConflictError(code, method, path, f"{said}; it has changed: read it again and decide again")
    if code == 404:
        return NotFoundError(code, method, path, f"{said}; it is gone, or its kind is not installed")
    if code in (401, 403):
        return ApiError(code, method, path, f"{said}; grant the verb {_VERBS[method]} on it to this account")
    if code == 422:
        return ApiError(code, method, path, f"{said}; the server does not allow this content")
    return ApiError(code, method, path, f"{said}; it will be retried")
