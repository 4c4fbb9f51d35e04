"""Objects written to the API server: one request each, one answer, no second try; who calls knows what is worth one.

    async with writing(access) as writer:
        node = await writer.get("/api/v1/nodes/a")
        await writer.patch("/api/v1/nodes/a", {"metadata": {"annotations": {...}}})

A `metadata.resourceVersion` in a body is a precondition: the server answers 409 when the object is not of this version
any more, and `ConflictError` is raised.
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
"""An object as JSON has it."""
PatchKind = Literal["merge", "strategic", "json"]

_PATCHES: Mapping[PatchKind, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}
_JSON = "application/json"
_LONGEST_SAID = 400
"""Characters of the server's own words that are shown: which account lacks which right stands at their end."""
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


class ApiError(Exception):
    """The server did not do it, or nobody knows whether it did (NoAnswer). The message says which object and what to do."""

    def __init__(self, code: int, method: str, path: str, why: str) -> None:
        super().__init__(f"{method} {path}: {why}")
        self.code = code
        """Status of the answer; 0 without one."""
        self.path = path


class NoResponseError(ApiError):
    """The request was perhaps done, perhaps not."""


class ConflictError(ApiError):
    """The object has changed since the version that was given: read it again and decide again."""


class AlreadyExistsError(ApiError):
    """There is such an object already."""


class NotFoundError(ApiError):
    """There is no such object, or no such kind."""


class ApiWriter:
    """Writes through one client. Paths are whole: `/api/v1/namespaces/shop/services/web`."""

    def __init__(self, api: ApiClient) -> None:
        self._api = api

    async def get(self, path: str) -> JsonObject:
        """The object now. Raises ApiError, as all of these do."""
        return await self._request("GET", path)

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """POST to the collection's path; the object as it was stored. Raises Exists."""
        return await self._request("POST", path, body, _JSON)

    async def update(self, path: str, body: JsonObject, *, subresource: str = "") -> JsonObject:
        """PUT the whole object; the object as it was stored. Raises Conflict."""
        return await self._request("PUT", _below(path, subresource), body, _JSON)

    async def patch(
        self, path: str, body: JsonObject | list[JsonObject], *, kind: PatchKind = "merge", subresource: str = ""
    ) -> JsonObject:
        """Change parts; the object as it was stored. `kind` json takes a list of operations. Raises Conflict."""
        return await self._request("PATCH", _below(path, subresource), body, _PATCHES[kind])

    async def delete(self, path: str) -> None:
        """Take it away. Raises Missing."""
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
    """A Writer with connections of its own, for as long as the block lasts."""
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
