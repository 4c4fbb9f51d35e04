"""Which kinds of objects the API has, and where.

Follows Kubernetes 1.34: names, short names, categories and verbs as `kubectl api-resources -o wide` prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

VERSION = "v1.34.0"
"""Version of Kubernetes that the API follows."""
ALL_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


class ApiResource(msgspec.Struct, frozen=True, kw_only=True):
    """One kind."""

    kind: str
    group: str = ""
    version: str = "v1"
    """The one in which its objects are stored, and that clients prefer."""
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    subresources: frozenset[str] = frozenset()
    served: tuple[str, ...] = ()
    """All versions that are served, the preferred one first; none named: `version` alone."""
    generation: bool = False
    """`metadata.generation` counts the changes of what is neither metadata nor status."""
    unconditional: bool = True
    """It may be written without a resourceVersion."""
    stored_as: str = ""
    """The name of the kind under which its objects are held, if it is another view of that."""
    custom: bool = False
    """It comes from a CustomResourceDefinition."""
    columns: Mapping[str, tuple[Mapping[str, Any], ...]] = {}
    """`additionalPrinterColumns` of a custom kind, by version."""
    scale: Mapping[str, str] = {}
    """`subresources.scale` of a custom kind: specReplicasPath and so on."""
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """`schema.openAPIV3Schema` of a custom kind, by version."""

    @property
    def name(self) -> str:
        """What the registry calls it: its kind, and for custom kinds the group behind it."""
        return f"{self.kind}.{self.group}" if self.custom else self.kind

    @property
    def singular(self) -> str:
        """One of them, in lower case."""
        return self.kind.lower()

    @property
    def api_version(self) -> str:
        """As objects write it."""
        return group_version(self.group, self.version)

    @property
    def versions(self) -> tuple[str, ...]:
        """All versions that are served."""
        return self.served or (self.version,)

    @property
    def has_status(self) -> bool:
        """Its status is written through a path of its own."""
        return "status" in self.subresources


def group_version(group: str, version: str) -> str:
    """As `apiVersion` has it."""
    return f"{group}/{version}" if group else version


_STATUS = frozenset({"status"})
_ALL = ("all",)


def _table(kinds: Iterable[ApiResource]) -> dict[str, ApiResource]:
    return {kind.name: kind for kind in kinds}


KINDS: Mapping[str, ApiResource] = _table(
    [
        ApiResource(kind="ConfigMap", plural="configmaps", short_names=("cm",)),
        ApiResource(kind="Endpoints", plural="endpoints", short_names=("ep",)),
        ApiResource(kind="Event", plural="events", short_names=("ev",)),
        ApiResource(kind="Namespace", plural="namespaces", namespaced=False, short_names=("ns",), subresources=_STATUS),
        ApiResource(kind="Node", plural="nodes", namespaced=False, short_names=("no",), subresources=_STATUS),
        ApiResource(
            kind="Pod",
            plural="pods",
            short_names=("po",),
            categories=_ALL,
            subresources=frozenset({"status", "binding", "eviction", "log", "exec", "attach", "portforward"}),
            generation=True,
        ),
        ApiResource(kind="Secret", plural="secrets"),
        ApiResource(kind="Service", plural="services", short_names=("svc",), categories=_ALL, subresources=_STATUS),
        ApiResource(kind="ServiceAccount", plural="serviceaccounts", short_names=("sa",)),
        ApiResource(
            kind="Deployment",
            group="apps",
            plural="deployments",
            short_names=("deploy",),
            categories=_ALL,
            subresources=frozenset({"status", "scale"}),
            generation=True,
        ),
        ApiResource(
            kind="ReplicaSet",
            group="apps",
            plural="replicasets",
            short_names=("rs",),
            categories=_ALL,
            subresources=frozenset({"status", "scale"}),
            generation=True,
        ),
        ApiResource(kind="Lease", group="coordination.k8s.io", plural="leases", unconditional=False),
        ApiResource(kind="EndpointSlice", group="discovery.k8s.io", plural="endpointslices", generation=True),
        ApiResource(
            kind="ServiceCIDR",
            group="networking.k8s.io",
            plural="servicecidrs",
            namespaced=False,
            subresources=_STATUS,
        ),
        ApiResource(
            kind="IPAddress",
            group="networking.k8s.io",
            plural="ipaddresses",
            namespaced=False,
            short_names=("ip",),
        ),
        ApiResource(
            kind="CustomResourceDefinition",
            group="apiextensions.k8s.io",
            plural="customresourcedefinitions",
            namespaced=False,
            short_names=("crd", "crds"),
            categories=("api-extensions",),
            subresources=_STATUS,
            generation=True,
        ),
        ApiResource(
            kind="IPAddressPool",
            group="metallb.io",
            version="v1beta1",
            plural="ipaddresspools",
            subresources=_STATUS,
            generation=True,
            unconditional=False,
        ),
        ApiResource(
            kind="L2Advertisement",
            group="metallb.io",
            version="v1beta1",
            plural="l2advertisements",
            generation=True,
            unconditional=False,
        ),
    ]
)
"""The built-in kinds, by name."""


VIEWS = (ApiResource(kind="Event", group="events.k8s.io", plural="events", short_names=("ev",), stored_as="Event"),)
"""Further places at which objects of a kind are served."""


def resource_of_definition(crd: Mapping[str, Any]) -> ApiResource | None:
    """The kind that a CustomResourceDefinition defines, None when it serves no version or lacks what is needed."""
    spec = crd.get("spec") or {}
    names = spec.get("names") or {}
    versions = [each for each in spec.get("versions") or [] if each.get("served") and each.get("name")]
    group, plural, kind = spec.get("group"), names.get("plural"), names.get("kind")
    if not (versions and group and plural and kind):
        return None
    stored = next((each for each in spec["versions"] if each.get("storage")), versions[0])
    parts = stored.get("subresources") or {}
    return ApiResource(
        kind=kind,
        group=group,
        version=stored["name"],
        plural=plural,
        namespaced=spec.get("scope") != "Cluster",
        short_names=tuple(names.get("shortNames") or ()),
        categories=tuple(names.get("categories") or ()),
        subresources=frozenset(name for name in ("status", "scale") if name in parts),
        served=tuple(newest_first(each["name"] for each in versions)),
        generation=True,
        unconditional=False,
        custom=True,
        columns={each["name"]: tuple(each.get("additionalPrinterColumns") or ()) for each in versions},
        scale=parts.get("scale") or {},
        schemas={each["name"]: (each.get("schema") or {}).get("openAPIV3Schema") or {} for each in versions},
    )


def newest_first(versions: Iterable[str]) -> list[str]:
    """Versions in the order in which clients prefer them."""
    return sorted(versions, key=_age, reverse=True)


def _age(version: str) -> tuple[int, int, int]:
    """Newer is greater: v2, v1, v1beta2, v1alpha1, others (apimachinery's version.CompareKubeAwareVersionStrings)."""
    found = re.fullmatch(r"v(\d+)(?:(alpha|beta)(\d+))?", version)
    if found is None:
        return -1, 0, 0
    return {"alpha": 0, "beta": 1, None: 2}[found[2]], int(found[1]), int(found[3] or 0)


_NAMES = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}
_BACK = {old: new for new, old in _NAMES.items()}


def event_to_v1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An Event of events.k8s.io/v1 as one of v1. What `raw` has of v1's own names stays."""
    return _renamed(raw, _NAMES, "v1")


def event_from_v1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """An Event of v1 as one of events.k8s.io/v1."""
    return _renamed(raw, _BACK, "events.k8s.io/v1")


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str], version: str) -> dict[str, Any]:
    fields = {names.get(name, name): value for name, value in raw.items()}
    return {**fields, "apiVersion": version, "kind": "Event"}
