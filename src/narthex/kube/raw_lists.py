"""Lists as the API server returns them, for programs that pass them on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable

PATHS = {
    "services": "/api/v1/services",
    "endpointslices": "/apis/discovery.k8s.io/v1/endpointslices",
    "nodes": "/api/v1/nodes",
    "pods": "/api/v1/pods",
    "networkpolicies": "/apis/networking.k8s.io/v1/networkpolicies",
}
_SECONDS = 60.0


def read_lists(access: Access) -> dict[str, dict[str, Any] | str]:
    """Return each list by the plural of its kind, or the reason why it could not be read."""
    return asyncio.run(_read(access))


async def _read(access: Access) -> dict[str, dict[str, Any] | str]:
    api = ApiClient(access)
    try:
        return {plural: await _list(api, path) for plural, path in PATHS.items()}
    finally:
        await api.close()


async def _list(api: ApiClient, path: str) -> dict[str, Any] | str:
    try:
        async with asyncio.timeout(_SECONDS):
            status, body = await api.exchange("GET", path, None, "application/json")
        if status != 200:
            return f"the server answers {status}"
        found = json.loads(body)
    except (Unreachable, TimeoutError, ValueError) as error:
        return str(error) or f"no answer within {_SECONDS:g} s"
    return found if isinstance(found, dict) else "the server answers with something else"
