"""Generate src/narthex/lab/api/types.txt: the types of Kubernetes' objects that the lab's API has, out of lightkube's models.

    python scripts/api_types.py

What those models do not say, which lists are sets of entries (`x-kubernetes-patch-merge-key`, `x-kubernetes-list-type`), is in
the tables here, after k8s.io/api's types.go.
"""

import importlib
import re
from pathlib import Path

HERE = Path(__file__).parents[1] / "src/narthex/lab/api/types.txt"
ROOTS = (
    "core_v1: ConfigMap Endpoints Event Namespace Node Pod Secret Service ServiceAccount Binding PodTemplateSpec",
    "apps_v1: Deployment ReplicaSet DaemonSet StatefulSet ControllerRevision",
    "authentication_v1: TokenRequest",
    "batch_v1: Job CronJob",
    "coordination_v1: Lease",
    "discovery_v1: EndpointSlice",
    "events_v1: Event",
    "networking_v1: ServiceCIDR IPAddress Ingress IngressClass",
    "apiextensions_v1: CustomResourceDefinition",
    "autoscaling_v1: Scale",
    "policy_v1: Eviction",
    "meta_v1: Status DeleteOptions",
)
OPAQUE = {
    "apiextensions_v1.JSONSchemaProps": "any",
    "apiextensions_v1.CustomResourceSubresourceStatus": "any",
    "meta_v1.FieldsV1": "any",
    "batch_v1.JobSchedulingConfiguration": "any",
}
SCALARS = {
    "str": "str",
    "int": "int",
    "float": "num",
    "bool": "bool",
    "meta_v1.Time": "time",
    "meta_v1.MicroTime": "time",
    "resource.Quantity": "quantity",
    "util_intstr.IntOrString": "intstr",
    "runtime.RawExtension": "any",
    "Any": "any",
    "dict": "any",
    "Dict": "any",
}

MERGED = """
core_v1.PodSpec containers name
core_v1.PodSpec initContainers name
core_v1.PodSpec ephemeralContainers name
core_v1.PodSpec volumes name
core_v1.PodSpec imagePullSecrets name
core_v1.PodSpec hostAliases ip
core_v1.PodSpec topologySpreadConstraints topologyKey topologyKey,whenUnsatisfiable
core_v1.PodSpec resourceClaims name
core_v1.PodSpec schedulingGates name
core_v1.Container ports containerPort containerPort,protocol
core_v1.Container env name
core_v1.Container volumeMounts mountPath
core_v1.Container volumeDevices devicePath
core_v1.EphemeralContainer ports containerPort containerPort,protocol
core_v1.EphemeralContainer env name
core_v1.EphemeralContainer volumeMounts mountPath
core_v1.EphemeralContainer volumeDevices devicePath
core_v1.ServiceSpec ports port port,protocol
core_v1.ServiceStatus conditions type
core_v1.PodStatus conditions type
core_v1.PodStatus podIPs ip
core_v1.NodeStatus addresses type
core_v1.NodeStatus conditions type
core_v1.NodeSpec podCIDRs =
core_v1.NamespaceStatus conditions type
core_v1.ServiceAccount secrets name
apps_v1.DeploymentStatus conditions type
apps_v1.ReplicaSetStatus conditions type
apps_v1.DaemonSetStatus conditions type
apps_v1.StatefulSetStatus conditions type
networking_v1.ServiceCIDRStatus conditions type
apiextensions_v1.CustomResourceDefinitionStatus conditions type
meta_v1.ObjectMeta ownerReferences uid
meta_v1.ObjectMeta finalizers =
"""
ATOMIC_TYPES = [
    "meta_v1.LabelSelector",
    "core_v1.ObjectReference",
    "core_v1.LocalObjectReference",
    "core_v1.SecretKeySelector",
    "core_v1.SecretReference",
    "core_v1.ConfigMapKeySelector",
    "core_v1.ObjectFieldSelector",
    "core_v1.ResourceFieldSelector",
    "core_v1.NodeSelector",
    "core_v1.NodeSelectorTerm",
    "core_v1.TypedLocalObjectReference",
]
ATOMIC_FIELDS = {
    ("core_v1.ServiceSpec", "selector"),
    ("core_v1.PodSpec", "nodeSelector"),
    ("discovery_v1.Endpoint", "deprecatedTopology"),
}

QUANTITIES = {
    "limits",
    "requests",
    "capacity",
    "allocatable",
    "overhead",
    "allocatedResources",
    "resourcesAllocated",
    "min",
    "max",
}

types = {}


def model(name):
    """Return the class of a model (`core_v1.Pod`)."""
    module, _, bare = name.partition(".")
    return getattr(importlib.import_module(f"lightkube.models.{module}"), bare)


def reference(text, module):
    """How the table writes a type of the models."""
    text = text.strip().removeprefix("'").removesuffix("'")
    for outer, form in (("Optional", "{}"), ("List", "[{}]")):
        if text.startswith(outer + "["):
            return form.format(reference(text[len(outer) + 1 : -1], module))
    if text.startswith(("Dict[", "dict[")):
        return "{" + reference(text[5:-1].split(",", 1)[1], module) + "}"
    if text.startswith("list["):
        return f"[{reference(text[5:-1], module)}]"
    if text in SCALARS or f"{module}.{text}" in SCALARS:
        return SCALARS.get(text) or SCALARS[f"{module}.{text}"]
    full = text if "." in text else f"{module}.{text}"
    if full in OPAQUE:
        return OPAQUE[full]
    collect(full)
    return full + ("|atomic" if full in ATOMIC_TYPES else "")


def map_of(name, key):
    """Return the type of a map's values, which the models do not state."""
    if key in QUANTITIES:
        return "quantity"
    return "bytes" if key == "binaryData" or (name, key) == ("core_v1.Secret", "data") else "str"


def collect(name):
    """Add a type, and all types that it refers to, to the table."""
    if name in types:
        return
    types[name] = []
    module = name.partition(".")[0]
    found = []
    annotations = getattr(model(name), "__annotations__", None)
    if not isinstance(model(name), type) or not annotations:
        raise SystemExit(f"{name} is {model(name)!r}: add it to SCALARS or OPAQUE")
    for key, annotation in annotations.items():
        ref = reference(annotation, module)
        if ref == "any" and annotation in ("Optional[dict]", "dict"):
            ref = "{" + map_of(name, key) + "}"
        merged = MERGE.get((name, key))
        if merged and ref.startswith("["):
            ref = f"{ref[:-1]};{merged[0]};{merged[-1]}]"
        if (name, key) in ATOMIC_FIELDS:
            ref += "|atomic"
        required = not annotation.startswith("Optional[")
        # The models add "_" to names that are Python's.
        found.append(f"{key.rstrip('_')}={ref}{'!' if required else ''}")
    types[name] = found


MERGE = {(name, field): rest for name, field, *rest in (line.split() for line in MERGED.strip().splitlines())}
for root in ROOTS:
    module, names = re.fullmatch(r"(\w+): (.*)", root).groups()
    for each in names.split():
        collect(f"{module}.{each}")
for name, field in MERGE:
    assert any(each.startswith(f"{field}=[") for each in types[name]), (name, field)

lines = [f"{name} {' '.join(found)}" for name, found in sorted(types.items())]
HERE.write_text("\n".join(lines) + "\n")
print(len(lines), "types")
