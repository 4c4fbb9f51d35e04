"""Request paths: which resource, which object, which subresource."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from narthex.lab.api.kinds import ApiResource, group_version
from narthex.lab.api.store import Key

_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[a-z]))?"
    r"/(?P<plural>[a-z0-9-]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[a-z]+))?)?/?"
)
_NAMESPACE = re.compile(r"/api/v1/namespaces/([^/]+)(?:/(status|finalize))?/?")

ResourcePaths = Mapping[tuple[str, str, str], ApiResource]
"""Resources by group, version, and plural."""


class ApiPath(msgspec.Struct, frozen=True):
    """A parsed request path."""

    kind: ApiResource
    version: str
    """Version of the resource's group that the client uses."""
    namespace: str = ""
    """Empty: all namespaces, or a cluster-scoped resource."""
    name: str = ""
    """Empty: the collection."""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Namespace and name of the object."""
        return self.namespace, self.name

    @property
    def stored(self) -> str:
        """Name of the kind in the registry."""
        return self.kind.stored_as or self.kind.name

    @property
    def api_version(self) -> str:
        """`apiVersion` of the objects that the client gets."""
        return group_version(self.kind.group, self.version)


def resource_paths(kinds: Iterable[ApiResource]) -> ResourcePaths:
    """Return the resources by their paths."""
    return {(kind.group, version, kind.plural): kind for kind in kinds for version in kind.versions}


def parse_path(path: str, known: ResourcePaths) -> ApiPath | None:
    """Return what a path addresses, None if nothing is served there."""
    # A namespace itself has a path like that of a list within one.
    found = _NAMESPACE.fullmatch(path)
    if found is not None:
        kind = known.get(("", "v1", "namespaces"))
        return None if kind is None else ApiPath(kind, "v1", name=found[1], subresource=found[2] or "")
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    group, version = ("", "v1") if match["core"] else (match["group"], match["version"])
    kind = known.get((group, version, match["plural"]))
    namespace, name = match["namespace"] or "", match["name"] or ""
    if kind is None or (namespace and not kind.namespaced) or (kind.namespaced and name and not namespace):
        return None
    return ApiPath(kind, version, namespace, name, match["part"] or "")
