"""Paths of the API: which kind, which object, which part of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from narthex.testing.apiserver_data import KINDS, Key

_UNNAMESPACED = frozenset({"Node", "ServiceCIDR", "Namespace"})
_PATH = re.compile(
    r"/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+/[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[a-z]))?"
    r"/(?P<plural>[a-z0-9]+)(?:/(?P<name>[^/]+)(?:/(?P<part>[a-z]+))?)?"
)


class Place(msgspec.Struct, frozen=True):
    """What a path means."""

    kind: str
    namespace: str = ""
    """Empty: all of them, or a kind without."""
    name: str = ""
    """Empty: the list."""
    subresource: str = ""

    @property
    def key(self) -> Key:
        """Of the object."""
        return self.namespace, self.name


def place(path: str, service_cidr_versions: Sequence[str], missing: frozenset[str]) -> Place | None:
    """What is there, None when nothing is. `missing` kinds are not installed."""
    # A namespace itself has a path like that of a list within one.
    found = re.fullmatch(r"/api/(v1)/(namespaces)/([^/]+)", path)
    if found is not None:
        return Place("Namespace", name=found[3])
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    kinds = {each: kind for kind, each in KINDS.items() if kind not in missing and kind != "ServiceCIDR"}
    kinds |= {(f"networking.k8s.io/{version}", "servicecidrs"): "ServiceCIDR" for version in service_cidr_versions}
    kind = kinds.get((match["core"] or match["group"], match["plural"]))
    namespace, name = match["namespace"] or "", match["name"] or ""
    if kind is None or (kind in _UNNAMESPACED and namespace) or (kind not in _UNNAMESPACED and name and not namespace):
        return None
    return Place(kind, namespace, name, match["part"] or "")
