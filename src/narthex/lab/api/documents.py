"""What the API says of itself: its version, its health, discovery and OpenAPI."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from narthex.lab.api import discovery, openapi, openapi_proto
from narthex.lab.api.accept import accepted, chosen
from narthex.lab.api.paths import Paths
from narthex.lab.api.requests import JSON, Request, Whole, encoded

_GROUP = re.compile(r"/apis/([^/]+)")
_VERSION = re.compile(r"/(?:api/(v1)|apis/([^/]+)/([^/]+))")
_OPENAPI = re.compile(r"/openapi/v3/(?:api/(v1)|apis/([^/]+)/([^/]+))")
_HEALTH = re.compile(r"/(healthz|livez|readyz)(?:/.*)?")
_AGGREGATED = "APIGroupDiscoveryList"


class Documents:
    """Documents, each made when it is first asked for."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._made: dict[str, Whole | None] = {}

    def answer(self, request: Request) -> Whole | None:
        """The document at a path, None when there is none. Raises ApiFault."""
        path = request.path.rstrip("/") or "/"
        if path in ("/api", "/apis"):
            return self._roots(path, request.headers.get("accept", ""))
        if path == "/openapi/v2":
            return self._openapi(request.headers.get("accept", ""))
        return self._once(path, lambda: self._document(path))

    def _once(self, name: str, make: Callable[[], Whole | None]) -> Whole | None:
        if name not in self._made:
            if (made := make()) is None:
                return None
            self._made[name] = made
        return self._made[name]

    def _document(self, path: str) -> Whole | None:
        if path == "/version":
            return encoded(200, discovery.version())
        if (health := _HEALTH.fullmatch(path)) is not None:
            return Whole(200, f"{health[1]} check passed\n".encode() if "/" in path[1:] else b"ok", {}, "text/plain")
        if path == "/":
            known = sorted(openapi.version_3_index(self._paths)["paths"])
            return encoded(
                200, {"paths": ["/api", "/apis", *(f"/{each}" for each in known), "/openapi/v2", "/openapi/v3"]}
            )
        if path == "/openapi/v3":
            return encoded(200, openapi.version_3_index(self._paths))
        if (found := _OPENAPI.fullmatch(path)) is not None:
            return _maybe(openapi.version_3(self._paths, found[2] or "", found[1] or found[3]))
        if (found := _VERSION.fullmatch(path)) is not None:
            return _maybe(discovery.resources(self._paths, found[2] or "", found[1] or found[3]))
        if (found := _GROUP.fullmatch(path)) is not None:
            return _maybe(discovery.group(self._paths, found[1]))
        return None

    def _roots(self, path: str, accept: str) -> Whole | None:
        offer = chosen(accept, _AGGREGATED)
        core = path == "/api"
        if offer.form != _AGGREGATED:
            return self._once(
                path, lambda: encoded(200, discovery.versions() if core else discovery.groups(self._paths))
            )
        version = offer.version if offer.version in ("v2", "v2beta1") else "v2"
        type = f"{JSON};g=apidiscovery.k8s.io;v={version};as={_AGGREGATED}"

        def make() -> Whole:
            made = encoded(200, discovery.aggregated(self._paths, version, core=core))
            return Whole(200, made.body, {"Vary": "Accept"}, type)

        return self._once(f"{path} {version}", make)

    def _openapi(self, accept: str) -> Whole | None:
        wants_proto = next((each.type for each in accepted(accept)), JSON) in openapi_proto.ASKED
        if not wants_proto:
            return self._once("/openapi/v2", lambda: encoded(200, openapi.version_2(self._paths)))

        def make() -> Whole:
            return Whole(200, openapi_proto.encode(openapi.version_2(self._paths)), {}, openapi_proto.SENT)

        return self._once("/openapi/v2 protobuf", make)


def _maybe(document: dict[str, Any] | None) -> Whole | None:
    return None if document is None else encoded(200, document)
