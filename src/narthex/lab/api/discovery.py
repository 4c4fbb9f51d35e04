"""Discovery and OpenAPI documents: groups, versions, and resources, plain and aggregated (KEP-3352)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from narthex.lab.api import openapi, openapi_protobuf
from narthex.lab.api.kinds import VERSION, ApiResource, group_version, newest_first
from narthex.lab.api.requests import (
    JSON,
    ApiRequest,
    ApiResponse,
    ResourcePaths,
    accepted_types,
    choose_type,
    json_response,
    resource_paths,
)

_STATUS_VERBS = ("get", "patch", "update")
_PROXY_VERBS = ("create", "delete", "get", "patch", "update")
SUBRESOURCES: Mapping[str, tuple[tuple[str, str, str], tuple[str, ...]]] = {
    "scale": (("autoscaling", "v1", "Scale"), _STATUS_VERBS),
    "binding": (("", "v1", "Binding"), ("create",)),
    "eviction": (("policy", "v1", "Eviction"), ("create",)),
    "token": (("authentication.k8s.io", "v1", "TokenRequest"), ("create",)),
    "exec": (("", "v1", "PodExecOptions"), ("create", "get")),
    "attach": (("", "v1", "PodAttachOptions"), ("create", "get")),
    "log": (("", "v1", "Pod"), ("get",)),
    "portforward": (("", "v1", "PodPortForwardOptions"), ("create", "get")),
    "ephemeralcontainers": (("", "v1", "Pod"), _STATUS_VERBS),
}
"""The kind of a subresource and its verbs, where it is not the object itself."""
REVIEWS = resource_paths(
    ApiResource(kind=kind, group="authorization.k8s.io", plural=f"{kind.lower()}s", namespaced=False, verbs=("create",))
    for kind in ("SelfSubjectAccessReview", "SelfSubjectRulesReview")
)
"""Questions of authorization.k8s.io that are answered and not kept."""
_NOBODY = [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}]
_VERSIONS = {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": _NOBODY}
"""The document at /api."""


def version() -> dict[str, str]:
    """Return the document at /version."""
    major, minor, _ = VERSION.removeprefix("v").split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"{VERSION}+narthex",
        "gitCommit": "",
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": "",
        "platform": "linux/amd64",
    }


def groups(paths: ResourcePaths) -> dict[str, Any]:
    """Return the document at /apis."""
    listed = [_group(name, found) for name, found in _served(paths).items() if name]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def group(paths: ResourcePaths, name: str) -> dict[str, Any] | None:
    """Return the document at /apis/NAME, None if there is no such group."""
    found = _served(paths).get(name)
    return None if found is None or not name else {"kind": "APIGroup", "apiVersion": "v1", **_group(name, found)}


def resources(paths: ResourcePaths, group: str, version: str) -> dict[str, Any] | None:
    """Return the document at /api/v1 or /apis/GROUP/VERSION, None if there is no such version."""
    if version not in _served(paths).get(group, ()):
        return None
    listed: list[dict[str, Any]] = []
    for kind in _of(paths, group, version):
        names = {"shortNames": list(kind.short_names), "categories": list(kind.categories)}
        entry = {"name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced, "kind": kind.kind}
        listed.append({**entry, "verbs": list(kind.verbs), **{name: each for name, each in names.items() if each}})
        for part, (of_group, of_version, of_kind), verbs in _parts(kind, version):
            below = {"name": f"{kind.plural}/{part}", "singularName": "", "namespaced": kind.namespaced}
            other = {} if of_group == group else {"group": of_group, "version": of_version}
            listed.append({**below, **other, "kind": of_kind, "verbs": list(verbs)})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version(group, version),
        "resources": listed,
    }


def aggregated(paths: ResourcePaths, version: str, *, core: bool) -> dict[str, Any]:
    """Return all of /api (`core`) or /apis in one document."""
    items = []
    for name, found in _served(paths).items():
        if bool(name) is core:
            continue
        listed = [
            {"version": each, "resources": _aggregated(paths, name, each), "freshness": "Current"} for each in found
        ]
        items.append({"metadata": {"name": name} if name else {}, "versions": listed})
    api_version = f"apidiscovery.k8s.io/{version}"
    return {"kind": "APIGroupDiscoveryList", "apiVersion": api_version, "metadata": {}, "items": items}


def _aggregated(paths: ResourcePaths, group: str, version: str) -> list[dict[str, Any]]:
    listed = []
    for kind in _of(paths, group, version):
        entry: dict[str, Any] = {
            "resource": kind.plural,
            "responseKind": {"group": group, "version": version, "kind": kind.kind},
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "singularResource": kind.singular,
            "verbs": list(kind.verbs),
            "shortNames": list(kind.short_names),
            "categories": list(kind.categories),
            "subresources": [
                {
                    "subresource": part,
                    "responseKind": dict(zip(("group", "version", "kind"), of, strict=True)),
                    "verbs": list(verbs),
                }
                for part, of, verbs in _parts(kind, version)
            ],
        }
        listed.append({name: value for name, value in entry.items() if value})
    return listed


def _parts(kind: ApiResource, version: str) -> Iterator[tuple[str, tuple[str, str, str], tuple[str, ...]]]:
    own = ((kind.group, version, kind.kind), _STATUS_VERBS)
    for part in sorted(kind.subresources):
        if part == "proxy":
            yield part, ("", "v1", f"{kind.kind}ProxyOptions"), _PROXY_VERBS
        elif part == "status" or part in SUBRESOURCES:
            of, verbs = SUBRESOURCES.get(part, own)
            yield part, of, verbs


def _served(paths: ResourcePaths) -> dict[str, list[str]]:
    """Return versions by group, in the order of preference. Groups of custom resources come last."""
    pairs = sorted({(group, version) for group, version, _ in paths})
    found = {name: newest_first(version for _, version in each) for name, each in groupby(pairs, lambda pair: pair[0])}
    custom = {kind.group for kind in paths.values() if kind.custom}
    return dict(sorted(found.items(), key=lambda entry: (entry[0] in custom, entry[0])))


def _of(paths: ResourcePaths, group: str, version: str) -> Iterable[ApiResource]:
    found = {plural: kind for (each, at, plural), kind in paths.items() if (each, at) == (group, version)}
    return [kind for _, kind in sorted(found.items())]


def _group(name: str, found: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": group_version(name, version), "version": version} for version in found]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


_GROUP = re.compile(r"/apis/([^/]+)")
_VERSION = re.compile(r"/(?:api/(v1)|apis/([^/]+)/([^/]+))")
_OPENAPI = re.compile(r"/openapi/v3/(?:api/(v1)|apis/([^/]+)/([^/]+))")
_HEALTH = re.compile(r"/(healthz|livez|readyz)(?:/.*)?")
_AGGREGATED = "APIGroupDiscoveryList"


class Documents:
    """Documents about the API, each built when it is first requested."""

    def __init__(self, paths: ResourcePaths) -> None:
        """Describe these resources, by group, version, and plural."""
        self.paths = paths
        self._listed = {**paths, **REVIEWS}
        self._made: dict[str, ApiResponse | None] = {}

    def answer(self, request: ApiRequest) -> ApiResponse | None:
        """Return the document at a path, None if there is none. Raises StatusError."""
        path = request.path.rstrip("/") or "/"
        if path in ("/api", "/apis"):
            return self._roots(path, request.headers.get("accept", ""))
        if path == "/openapi/v2":
            return self._openapi(request.headers.get("accept", ""))
        return self._once(path, lambda: self._document(path))

    def _once(self, name: str, make: Callable[[], ApiResponse | None]) -> ApiResponse | None:
        if name not in self._made:
            if (made := make()) is None:
                return None
            self._made[name] = made
        return self._made[name]

    def _document(self, path: str) -> ApiResponse | None:
        if path == "/version":
            return json_response(200, version())
        if (health := _HEALTH.fullmatch(path)) is not None:
            body = f"{health[1]} check passed\n".encode() if "/" in path[1:] else b"ok"
            return ApiResponse(200, body, {}, "text/plain")
        if path == "/":
            known = (f"/{each}" for each in sorted(openapi.version_3_index(self.paths)["paths"]))
            return json_response(200, {"paths": ["/api", "/apis", *known, "/openapi/v2", "/openapi/v3"]})
        if path == "/openapi/v3":
            return json_response(200, openapi.version_3_index(self.paths))
        if (found := _OPENAPI.fullmatch(path)) is not None:
            return _maybe(openapi.version_3(self.paths, found[2] or "", found[1] or found[3]))
        if (found := _VERSION.fullmatch(path)) is not None:
            return _maybe(resources(self._listed, found[2] or "", found[1] or found[3]))
        if (found := _GROUP.fullmatch(path)) is not None:
            return _maybe(group(self._listed, found[1]))
        return None

    def _roots(self, path: str, accept: str) -> ApiResponse | None:
        offer = choose_type(accept, _AGGREGATED)
        core = path == "/api"
        if offer.form != _AGGREGATED:
            return self._once(path, lambda: json_response(200, _VERSIONS if core else groups(self._listed)))
        version = offer.version if offer.version in ("v2", "v2beta1") else "v2"
        type = f"{JSON};g=apidiscovery.k8s.io;v={version};as={_AGGREGATED}"

        def make() -> ApiResponse:
            """Return the aggregated discovery document in the requested version."""
            made = json_response(200, aggregated(self._listed, version, core=core))
            return ApiResponse(200, made.body, {"Vary": "Accept"}, type)

        return self._once(f"{path} {version}", make)

    def _openapi(self, accept: str) -> ApiResponse | None:
        if next((each.type for each in accepted_types(accept)), JSON) not in openapi_protobuf.ACCEPTED:
            return self._once("/openapi/v2", lambda: json_response(200, openapi.version_2(self.paths)))

        def make() -> ApiResponse:
            """Return the OpenAPI 2 document in protobuf encoding."""
            encoded = openapi_protobuf.encode(openapi.version_2(self.paths))
            return ApiResponse(200, encoded, {}, openapi_protobuf.MEDIA_TYPE)

        return self._once("/openapi/v2 protobuf", make)


def _maybe(document: dict[str, Any] | None) -> ApiResponse | None:
    return None if document is None else json_response(200, document)
