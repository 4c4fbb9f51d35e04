"""One-time reads of a cluster through its API server, as objects or as JSON, for commands that print something and exit."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from narthex.kube.access import Access
from narthex.kube.client import ApiClient, Unreachable
from narthex.kube.messages import WATCH_TIMES
from narthex.kube.resources import WatchedResource
from narthex.kube.source import follow
from narthex.kube.watch import Watch
from narthex.model import Event, Problem
from narthex.model.backoff import Backoff

PATIENCE_SECONDS = 30.0
_ATTEMPTS = 3
_TIMES = msgspec.structs.replace(WATCH_TIMES, backoff=Backoff(0.2, 2.0, jitter=1.0), list_silence=PATIENCE_SECONDS)


def read_once(
    access: Access, resources: Sequence[WatchedResource], seconds: float = PATIENCE_SECONDS
) -> tuple[list[Event], tuple[Problem, ...]]:
    """Return the objects of these lists and the problems of those that cannot be used. Raises Unreachable."""
    return asyncio.run(_read(access, resources, seconds))


async def _read(
    access: Access, resources: Sequence[WatchedResource], seconds: float
) -> tuple[list[Event], tuple[Problem, ...]]:
    api = ApiClient(access)
    events: list[Event] = []
    watches = [Watch(each, random.random, _TIMES, streaming=False, newest=True) for each in resources]
    done = asyncio.Event()

    def collect(watch: Watch, received: tuple[Event, ...]) -> None:
        """Keep the events of a watch; set `done` once all watches have synced or this one has failed too often."""
        events.extend(received)
        failed = not watch.synced and sum(watch.counts.failures.values()) >= _ATTEMPTS
        if failed or all(each.synced for each in watches):
            done.set()

    running = [asyncio.create_task(follow(watch, api, collect)) for watch in watches]
    try:
        async with asyncio.timeout(seconds):
            await asyncio.wait([asyncio.create_task(done.wait()), *running], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        pass
    finally:
        for task in running:
            task.cancel()
        ended = await asyncio.gather(*running, return_exceptions=True)
        await api.aclose()
    for error in ended:
        if isinstance(error, Exception):
            raise error
    for watch in watches:
        if not watch.synced:
            why = watch.trouble.message if watch.trouble else f"no answer within {seconds:g} s"
            raise Unreachable(f"{access.origin}: {watch.resource.paths[0]}: {why}")
    unseen = tuple(watch.trouble for watch in watches if watch.trouble is not None)
    return events, unseen + tuple(problem for watch in watches for problem in watch.cache.problems)


_RAW_PATHS = {
    "services": "/api/v1/services",
    "endpointslices": "/apis/discovery.k8s.io/v1/endpointslices",
    "nodes": "/api/v1/nodes",
    "pods": "/api/v1/pods",
    "networkpolicies": "/apis/networking.k8s.io/v1/networkpolicies",
}
_RAW_SECONDS = 60.0
UNKNOWN_KIND = "the server does not know this kind of object"


def read_lists(access: Access) -> dict[str, dict[str, Any] | str]:
    """Return each list as the server returned it, by the plural of its kind, or the reason why it could not be read."""
    return asyncio.run(_read_raw(access))


async def _read_raw(access: Access) -> dict[str, dict[str, Any] | str]:
    async with aclosing(ApiClient(access)) as api:
        return {plural: await _raw_list(api, path) for plural, path in _RAW_PATHS.items()}


async def _raw_list(api: ApiClient, path: str) -> dict[str, Any] | str:
    try:
        async with asyncio.timeout(_RAW_SECONDS):
            status, body = await api.exchange("GET", path, None, "application/json")
        if status == 404:
            return UNKNOWN_KIND
        if status != 200:
            return f"the server answers {status}"
        found = json.loads(body)
    except (Unreachable, TimeoutError, ValueError) as error:
        return str(error) or f"no answer within {_RAW_SECONDS:g} s"
    return found if isinstance(found, dict) else "the server answers with something else"
