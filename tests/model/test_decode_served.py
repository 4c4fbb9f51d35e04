"""Objects of an API server: whatever is odd in one costs only the field or list item itself, and never the object."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.model.bases import CIDR, DEPLOYMENT, NODE, POD, SERVICE, SLICE, changed

from narthex.model.decode.objects import decode, decode_json

POOL = {
    "apiVersion": "metallb.io/v1beta1",
    "kind": "IPAddressPool",
    "metadata": {"name": "public", "namespace": "metallb-system"},
    "spec": {"addresses": ["192.0.2.0/24"]},
}
ADVERTISEMENT = {
    "apiVersion": "metallb.io/v1beta1",
    "kind": "L2Advertisement",
    "metadata": {"name": "public", "namespace": "metallb-system"},
    "spec": {"ipAddressPools": ["public"]},
}
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "shop"}}
KINDS = [SERVICE, SLICE, NODE, CIDR, POD, DEPLOYMENT, NAMESPACE, POOL, ADVERTISEMENT]
LENIENT = [SERVICE, SLICE, NODE, POD, DEPLOYMENT, NAMESPACE]

odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "None", "x\ny", "a" * 300, "10.0.0.300", "\x1b[31m", "é"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
new_keys = st.from_regex(r"x[A-Z][a-z]{1,6}", fullmatch=True)
ODD_PLACES = {
    "Service": [
        "spec/ports/0/nodePort", "spec/ports/0/targetPort", "spec/ports/1", "spec/sessionAffinity", "spec/trafficDistribution",
        "spec/sessionAffinityConfig", "spec/sessionAffinityConfig/clientIP", "spec/loadBalancerIP", "spec/selector",
        "spec/healthCheckNodePort", "spec/ipFamilies", "spec/ipFamilyPolicy", "spec/allocateLoadBalancerNodePorts",
        "spec/externalTrafficPolicy", "spec/internalTrafficPolicy", "spec/externalIPs", "spec/externalName", "status",
        "status/loadBalancer", "status/loadBalancer/ingress", "status/conditions", "spec/loadBalancerClass",
        "spec/publishNotReadyAddresses",
    ],
    "EndpointSlice": [
        "endpoints/0/hostname", "endpoints/0/zone", "endpoints/0/nodeName", "endpoints/0/targetRef", "endpoints/0/hints",
        "endpoints/0/hints/forZones", "endpoints/1", "ports/1", "endpoints/0/deprecatedTopology",
    ],
    "Node": ["spec/taints", "spec/podCIDRs", "status/addresses", "status/conditions", "status/images", "spec/providerID"],
    "Pod": ["spec/containers", "spec/containers/0", "spec/hostname", "spec/nodeSelector", "spec/volumes", "status/conditions",
            "status/podIPs", "spec"],
    "Deployment": ["spec/replicas", "spec/template/spec/containers", "spec/template/spec", "status"],
    "Namespace": ["spec", "status"],
    "ServiceCIDR": ["status", "status/conditions"],
    "IPAddressPool": ["status"],
    "L2Advertisement": ["status"],
}  # fmt: skip
EVERYWHERE = ["metadata/labels", "metadata/annotations", "metadata/managedFields", "metadata/ownerReferences",
              "metadata/uid", "metadata/finalizers", "metadata/generation"]  # fmt: skip


def served(raw: Any) -> Any:
    """Decode as a watch does, both ways."""
    return decode_json(msgspec.json.encode(raw), kind=raw["kind"], served=True)


def put(raw: Any, path: str, value: Any) -> None:
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    inside = raw
    for step in parents:
        if isinstance(inside, dict) and not isinstance(inside.get(step), dict | list):
            inside[step] = {}
        inside = inside[step]
    if isinstance(inside, list):
        inside[last : last + 1] = [value]
    else:
        inside[last] = value


@given(st.data())
def test_odd_values_in_unused_places_never_drop_an_object(data):
    raw = copy.deepcopy(data.draw(st.sampled_from(KINDS)))
    places = EVERYWHERE + ODD_PLACES[raw["kind"]]
    for path in data.draw(st.lists(st.sampled_from(places), max_size=4, unique=True)):
        if raw["kind"] == "Pod" and path.startswith("spec/") and not isinstance(raw["spec"], dict):
            continue
        if path.count("/") > 1 and not all(isinstance(raw, dict | list) for raw in within(raw, path)):
            continue
        put(raw, path, data.draw(odd))
    for key in data.draw(st.lists(new_keys, max_size=3)):
        inside = data.draw(
            st.sampled_from([raw, raw["metadata"]] + [each for each in (raw.get("spec"),) if isinstance(each, dict)])
        )
        inside[key] = data.draw(odd)
    made = served(raw)
    assert made.object is not None, (raw, made.problems)
    assert all(problem.severity == "warning" for problem in made.problems)
    assert (made.object.name, made.object.namespace) == (raw["metadata"]["name"], raw["metadata"].get("namespace", ""))
    shown = repr(made.object) + "".join(map(str, made.problems))
    assert "\\n" not in shown.replace("\\\\n", "") or "annotations" in shown


def within(raw: Any, path: str) -> list[Any]:
    """Values on the way to a place, as far as they exist."""
    found, inside = [], raw
    for step in path.split("/")[:-1]:
        try:
            inside = inside[int(step) if step.isdigit() else step]
        except (KeyError, IndexError, TypeError):
            break
        found.append(inside)
    return found


@pytest.mark.parametrize("raw", LENIENT, ids=lambda raw: raw["kind"])
def test_a_manifest_stays_strict(raw):
    assert decode(changed(raw, "metadata/labels", {"a b": "c"})).object is None
    assert served(changed(raw, "metadata/labels", {"a b": "c", "app": "web"})).object.labels == (("app", "web"),)


def test_an_affinity_that_is_left_over():
    """The API server clears it when the affinity is switched off; older ones have stored it."""
    raw = changed(SERVICE, "spec/sessionAffinity", "None")
    raw["spec"]["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 10800}}
    made = served(raw)
    assert made.object.affinity_seconds is None and made.problems == ()
    assert decode(raw).object is None


def test_a_pod_without_containers():
    raw = changed(changed(POD, "spec", {"nodeName": "worker-a"}), "status", {"phase": "Running", "podIP": "10.64.1.5"})
    assert served(raw).object.ips == ("10.64.1.5",)
    assert served(changed(raw, "spec/containers", {"odd": 1})).object.ips == ("10.64.1.5",)
    assert decode(raw).object is None


@pytest.mark.parametrize(
    ("path", "value", "left"),
    [
        ("spec/ports/0/nodePort", 70000, [("http", 80, 0)]),
        ("spec/ports/0/nodePort", "30080", [("http", 80, 0)]),
        ("spec/ports/0/targetPort", 1.5, [("http", 80, 0)]),
        ("spec/ports/0/port", "80", []),
        ("spec/ports/0/protocol", "QUIC", []),
        ("spec/ports/0/name", "a\nb", []),
    ],
)
def test_a_port_is_used_if_what_matters_is_sound(path, value, left):
    made = served(changed(SERVICE, path, value)).object
    assert [(port.name, port.port, port.node_port) for port in made.ports] == left
    assert made.cluster_ips == ("10.110.0.1",)


def test_an_unusable_class_is_not_the_default_one():
    assert served(changed(SERVICE, "spec/loadBalancerClass", "a b")).object.load_balancer_class == "invalid"


def test_what_decides_who_may_use_an_address_is_used_as_a_whole():
    bad = changed(POOL, "spec/serviceAllocation", {"namespaces": ["a b"]})
    assert served(bad).object is None
    assert served(changed(POOL, "spec/serviceAllocation", {"namespaces": 5})).object is None
    assert served(changed(CIDR, "spec/cidrs", ["10.110.0.0/16", "x"])).object is None


def test_without_a_name_there_is_no_object():
    for raw in KINDS:
        assert served(changed(raw, "metadata/name", "a\nb")).object is None
        assert served(changed(raw, "metadata", [])).object is None


def test_odd_values_are_bounded():
    """Each costs another look at the whole object."""
    raw = changed(SERVICE, "spec/ports", [{"port": "x"}] * 150)
    assert served(raw).object is None
