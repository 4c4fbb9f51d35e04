"""The resources of the API, built in and defined by CustomResourceDefinitions.

Names, short names, categories, and verbs are those that `kubectl api-resources -o wide` prints for Kubernetes 1.34.
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
    """A resource (`metav1.APIResource`) and how its objects are stored."""

    kind: str
    group: str = ""
    version: str = "v1"
    """Storage version, which clients prefer."""
    plural: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ALL_VERBS
    subresources: frozenset[str] = frozenset()
    served: tuple[str, ...] = ()
    """Served versions, the preferred one first. Empty: `version` alone."""
    generation: bool = False
    """True if `metadata.generation` counts changes outside metadata and status."""
    unconditional: bool = True
    """True if an update needs no resourceVersion (`AllowUnconditionalUpdate`)."""
    stored_as: str = ""
    """Name of the kind whose objects this resource shows in another form."""
    custom: bool = False
    """True if a CustomResourceDefinition defines it."""
    columns: Mapping[str, tuple[Mapping[str, Any], ...]] = {}
    """`additionalPrinterColumns` of a custom kind, by version."""
    scale: Mapping[str, str] = {}
    """`subresources.scale` of a custom kind: specReplicasPath and so on."""
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """`schema.openAPIV3Schema` of a custom kind, by version."""

    @property
    def name(self) -> str:
        """Name in the registry: the kind; for custom resources, kind and group."""
        return f"{self.kind}.{self.group}" if self.custom else self.kind

    @property
    def singular(self) -> str:
        """Singular name in lower case."""
        return self.kind.lower()

    @property
    def api_version(self) -> str:
        """`apiVersion` of stored objects."""
        return group_version(self.group, self.version)

    @property
    def versions(self) -> tuple[str, ...]:
        """Served versions."""
        return self.served or (self.version,)

    @property
    def has_status(self) -> bool:
        """True if it has the subresource `status`."""
        return "status" in self.subresources


def group_version(group: str, version: str) -> str:
    """Return an `apiVersion`."""
    return f"{group}/{version}" if group else version


def _built_in(kind: str, plural: str, short_names: str = "", subresources: str = "", **more: Any) -> ApiResource:
    return ApiResource(
        kind=kind,
        plural=plural,
        short_names=tuple(short_names.split()),
        subresources=frozenset(subresources.split()),
        **more,
    )


_ALL = ("all",)
_METALLB: Mapping[str, Any] = {"group": "metallb.io", "version": "v1beta1", "generation": True, "unconditional": False}

KINDS: Mapping[str, ApiResource] = {
    resource.name: resource
    for resource in (
        _built_in("ConfigMap", "configmaps", "cm"),
        _built_in("Endpoints", "endpoints", "ep"),
        _built_in("Event", "events", "ev"),
        _built_in("Namespace", "namespaces", "ns", "status", namespaced=False),
        _built_in("Node", "nodes", "no", "status proxy", namespaced=False),
        _built_in(
            "Pod",
            "pods",
            "po",
            "status binding eviction log exec attach portforward proxy ephemeralcontainers",
            categories=_ALL,
            generation=True,
        ),
        _built_in("Secret", "secrets"),
        _built_in("Service", "services", "svc", "status proxy", categories=_ALL),
        _built_in("ServiceAccount", "serviceaccounts", "sa", "token"),
        _built_in(
            "Deployment", "deployments", "deploy", "status scale", group="apps", categories=_ALL, generation=True
        ),
        _built_in("ReplicaSet", "replicasets", "rs", "status scale", group="apps", categories=_ALL, generation=True),
        _built_in("DaemonSet", "daemonsets", "ds", "status", group="apps", categories=_ALL, generation=True),
        _built_in("StatefulSet", "statefulsets", "sts", "status scale", group="apps", categories=_ALL, generation=True),
        _built_in("ControllerRevision", "controllerrevisions", group="apps"),
        _built_in("Job", "jobs", "", "status", group="batch", categories=_ALL, generation=True),
        _built_in("CronJob", "cronjobs", "cj", "status", group="batch", categories=_ALL, generation=True),
        _built_in("Lease", "leases", group="coordination.k8s.io", unconditional=False),
        _built_in("EndpointSlice", "endpointslices", group="discovery.k8s.io", generation=True),
        _built_in("Ingress", "ingresses", "ing", "status", group="networking.k8s.io", generation=True),
        _built_in("IngressClass", "ingressclasses", group="networking.k8s.io", namespaced=False, generation=True),
        _built_in("NetworkPolicy", "networkpolicies", "netpol", group="networking.k8s.io", generation=True),
        _built_in("ServiceCIDR", "servicecidrs", "", "status", group="networking.k8s.io", namespaced=False),
        _built_in("IPAddress", "ipaddresses", "ip", group="networking.k8s.io", namespaced=False),
        _built_in(
            "CustomResourceDefinition",
            "customresourcedefinitions",
            "crd crds",
            "status",
            group="apiextensions.k8s.io",
            categories=("api-extensions",),
            namespaced=False,
            generation=True,
        ),
        _built_in("IPAddressPool", "ipaddresspools", "", "status", **_METALLB),
        _built_in("L2Advertisement", "l2advertisements", **_METALLB),
    )
}
"""Built-in resources by kind."""
VIEWS = (_built_in("Event", "events", "ev", group="events.k8s.io", stored_as="Event"),)
"""Resources that show stored objects of another resource."""


def resource_of_definition(crd: Mapping[str, Any]) -> ApiResource | None:
    """Return the resource that a CustomResourceDefinition defines, None if it serves no version or is incomplete."""
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
    """Return versions in the order in which clients prefer them."""
    return sorted(versions, key=_age, reverse=True)


def _age(version: str) -> tuple[int, int, int]:
    """Return a sort key: v2, v1, v1beta2, v1alpha1, others (apimachinery's version.CompareKubeAwareVersionStrings)."""
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
    """Convert an Event of events.k8s.io/v1 to v1, in which Events are stored (k8s.io/kubernetes/pkg/apis/events/v1)."""
    return _renamed(raw, _NAMES, "v1")


def event_from_v1(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an Event of v1 to events.k8s.io/v1."""
    return _renamed(raw, _BACK, "events.k8s.io/v1")


def _renamed(raw: Mapping[str, Any], names: Mapping[str, str], version: str) -> dict[str, Any]:
    fields = {names.get(name, name): value for name, value in raw.items()}
    return {**fields, "apiVersion": version, "kind": "Event"}
