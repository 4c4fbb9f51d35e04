"""Addresses of Services that the decoder refuses: what their status holds is theirs all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from narthex.kube.access import Access
from narthex.kube.resources import ALL_SERVICES
from narthex.kube.writes import ApiError, writing
from narthex.model.names import NamespacedName
from narthex.model.net import address
from narthex.runtime.logs import LOGGER, printable

_SECONDS = 30.0


def held_by_unreadable(
    access: Access, readable: Callable[[NamespacedName], bool]
) -> Mapping[NamespacedName, tuple[str, ...]] | None:
    """What the statuses of all Services hold that are not readable; None when the server does not say."""
    try:
        found = asyncio.run(_list(access))
    except (ApiError, TimeoutError) as error:
        LOGGER.warning("Services that cannot be read may hold addresses, and are not shown: %s", printable(str(error)))
        return None
    held = {_key(raw): _addresses(raw) for raw in found.get("items") or () if isinstance(raw, dict)}
    return {key: addresses for key, addresses in held.items() if addresses and not readable(key)}


async def _list(access: Access) -> dict[str, Any]:
    async with asyncio.timeout(_SECONDS), writing(access) as writer:
        return await writer.get(ALL_SERVICES.paths[0])


def _key(raw: dict[str, Any]) -> NamespacedName:
    meta = raw.get("metadata") or {}
    return NamespacedName(str(meta.get("namespace") or "default"), str(meta.get("name") or ""))


def _addresses(raw: dict[str, Any]) -> tuple[str, ...]:
    balancer = (raw.get("status") or {}).get("loadBalancer") or {}
    found = []
    for entry in balancer.get("ingress") or ():
        try:
            found.append(address(str(entry.get("ip") or "")))
        except ValueError:
            # Not an address, so nothing that a pool could hold.
            continue
    return tuple(found)
