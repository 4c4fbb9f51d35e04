"""Metrics of the API server, by the names of kube-apiserver."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from narthex.lab.api.api import ApiHandler
from narthex.lab.api.requests import ApiRequest, ApiResponse, is_true, parse_path
from narthex.runtime.metrics import CONTENT_TYPE, counter, exposition, gauge

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PATH = "/metrics"


class RequestMetrics:
    """Counts the requests to an API server."""

    def __init__(self, api: ApiHandler, lock: threading.RLock) -> None:
        """Start at zero. The lock is held while objects are counted."""
        self._api = api
        self._lock = lock
        self._requests: Counter[tuple[str, ...]] = Counter()

    def note(self, request: ApiRequest, code: int) -> None:
        """Count an answered request."""
        where = parse_path(request.path, self._api.resource_paths)
        if where is None:
            self._requests[request.method, "", "", "", "", str(code)] += 1
            return
        verb = request.method
        if verb == "GET" and not where.name:
            verb = "WATCH" if is_true(request.query, "watch") else "LIST"
        key = (verb, where.kind.group, where.version, where.kind.plural, where.subresource, str(code))
        self._requests[key] += 1

    def collect(self) -> Iterable[Metric]:
        """Return the present metrics."""
        labels = ("verb", "group", "version", "resource", "subresource", "code")
        yield counter(
            "apiserver_request", "Requests that were answered, by what they addressed.", self._requests, *labels
        )
        with self._lock:
            registry = self._api.registry
            objects = {
                (kind.plural if not kind.group else f"{kind.plural}.{kind.group}"): float(
                    len(registry.store.entries(name))
                )
                for name, kind in registry.kinds.items()
            }
        yield gauge("apiserver_storage_objects", "Objects that are stored.", objects, "resource")

    def response(self) -> ApiResponse:
        """Return the answer to a scrape."""
        return ApiResponse(200, exposition(self), content_type=CONTENT_TYPE)
