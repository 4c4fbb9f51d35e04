"""What the API server would refuse is refused, and the problem says where and why."""

import copy

import msgspec
import pytest
from tests.model.bases import CIDR, DEPLOYMENT, GONE, NODE, POD, SERVICE, SLICE, changed

from narthex.model.decode.objects import Problem, decode, decode_json, load
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import (
    Container,
    ContainerPort,
    Deployment,
    EndpointPort,
    EndpointSlice,
    LoadBalancerIngress,
    NamespacedName,
    Node,
    Pod,
    PodSpec,
    Service,
    ServiceCIDR,
    ServicePort,
    SliceEndpoint,
)


@pytest.mark.parametrize("base", [SERVICE, SLICE, NODE, CIDR, POD, DEPLOYMENT], ids=lambda raw: raw["kind"])
def test_the_bases_are_good(base):
    decoded = decode(base, "web.yaml:1")
    assert decoded.problems == ()
    assert decoded.object.origin == "web.yaml:1"
    assert decode_json(msgspec.json.encode(base), "web.yaml:1") == decoded
    assert decode_json(msgspec.json.encode(base), "web.yaml:1", base["kind"]) == decoded


TWO_PORTS = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
LONG = "x" * 64
HOSTILE = [
    "web\n-A INPUT -j ACCEPT",
    "web; flush ruleset",
    'web" } table ip x {',
    "$(reboot)",
    "web`id`",
    "web comment",
    "../../etc/passwd",
    "web\x00",
    "web\x1b[31m",
    "web\n",
    "-j",
    "*",
    "Web",
    "wéb",
    "\u202ebew",
    LONG,
]

REFUSED = [
    # Service
    (SERVICE, "metadata/name", GONE, "metadata.name", "is required"),
    (SERVICE, "metadata/name", 123, "metadata.name", '123 is a number, must be text; write "123" with quotes'),
    (SERVICE, "metadata/namespace", "Shop", "metadata.namespace", "is not a DNS label"),
    (SERVICE, "metadata", "web", "metadata", "'web' is text, must be a mapping"),
    (SERVICE, "metadata/labels", ["a"], "metadata.labels", "is a list, must be a mapping of text to text"),
    (SERVICE, "metadata/labels", {"a": 1}, "metadata.labels[a]", '1 is a number, must be text; write "1" with quotes'),
    (SERVICE, "metadata/labels", {"a": "b c"}, "metadata.labels[a]", "is not a label value"),
    (SERVICE, "metadata/labels", {"a b": "c"}, "metadata.labels", "is not a label key"),
    (SERVICE, "metadata/annotations", {"a": []}, "metadata.annotations[a]", "is a list, must be text"),
    (SERVICE, "metadata/annotations", {"a b": ""}, "metadata.annotations", "is not an annotation key"),
    (SERVICE, "metadata/annotations", {"a": "x" * 300000}, "metadata.annotations", "at most 262144"),
    (SERVICE, "spec", GONE, "spec", "is required"),
    (SERVICE, "spec/type", "Nodeport", "spec.type", "is not ClusterIP, NodePort, LoadBalancer or ExternalName"),
    (SERVICE, "spec/ports", [], "spec.ports", "is required: at least one port"),
    (SERVICE, "spec/ports", GONE, "spec.ports", "is required: at least one port"),
    (SERVICE, "spec/ports", {"port": 80}, "spec.ports", "is a mapping, must be a list"),
    (SERVICE, "spec/ports/0", None, "spec.ports[0]", "is nothing, must be a mapping"),
    (SERVICE, "spec/ports/0/port", GONE, "spec.ports[0].port", "is required"),
    (SERVICE, "spec/ports/0/port", 0, "spec.ports[0].port", "0 is not a port (1-65535)"),
    (SERVICE, "spec/ports/0/port", 70000, "spec.ports[0].port", "70000 is not a port (1-65535)"),
    (SERVICE, "spec/ports/0/port", -1, "spec.ports[0].port", "-1 is not a port (1-65535)"),
    (SERVICE, "spec/ports/0/port", 2**70, "spec.ports[0].port", "more than 20 digits is not a port"),
    (SERVICE, "spec/ports/0/port", "80", "spec.ports[0].port", "must be a whole number; write it without quotes"),
    (SERVICE, "spec/ports/0/port", 80.5, "spec.ports[0].port", "80.5 is a number, must be a whole number"),
    (SERVICE, "spec/ports/0/port", True, "spec.ports[0].port", "true is true or false, must be a whole number"),
    (SERVICE, "spec/ports/0/protocol", "tcp", "spec.ports[0].protocol", "'tcp' is not TCP, UDP or SCTP"),
    (SERVICE, "spec/ports/0/protocol", "ICMP", "spec.ports[0].protocol", "'ICMP' is not TCP, UDP or SCTP"),
    (SERVICE, "spec/ports/0/targetPort", 70000, "spec.ports[0].targetPort", "is not a port"),
    (SERVICE, "spec/ports/0/targetPort", "80", "spec.ports[0].targetPort", "is not a port name"),
    (SERVICE, "spec/ports/0/targetPort", "a--b", "spec.ports[0].targetPort", "is not a port name"),
    (SERVICE, "spec/ports/0/targetPort", [80], "spec.ports[0].targetPort", "must be a whole number or text"),
    (SERVICE, "spec/ports/0/nodePort", 70000, "spec.ports[0].nodePort", "is not a port"),
    (SERVICE, "spec/ports", [{"port": 80}, {"port": 81}], "spec.ports[0].name", "is required when there are several"),
    (SERVICE, "spec/ports", [TWO_PORTS[0], {"name": "a", "port": 81}], "spec.ports[1].name", "spec.ports[0] already"),
    (SERVICE, "spec/ports", [TWO_PORTS[0], {"name": "b", "port": 80}], "spec.ports[1]", "80/TCP is spec.ports[0] already"),
    (SERVICE, "spec/clusterIP", "10.110.0", "spec.clusterIP", "'10.110.0' is not an IP address"),
    (SERVICE, "spec/clusterIP", "none", "spec.clusterIP", "allowed: an address, None or nothing"),
    (SERVICE, "spec/clusterIP", "127.0.0.1", "spec.clusterIP", "is a loopback address"),
    (SERVICE, "spec/clusterIP", "fe80::1%eth0", "spec.clusterIP", "is not an IP address"),
    (SERVICE, "spec/clusterIPs", ["10.110.0.2"], "spec.clusterIPs", "but spec.clusterIP is '10.110.0.1'"),
    (SERVICE, "spec/clusterIPs", ["10.110.0.1", "10.110.0.2"], "spec.clusterIPs", "one address of each IP family"),
    (SERVICE, "spec/clusterIPs", ["10.110.0.1", "None"], "spec.clusterIPs", "must be the only value"),
    (SERVICE, "spec/clusterIPs", ["10.110.0.1", "x"], "spec.clusterIPs[1]", "'x' is not an IP address"),
    (SERVICE, "spec/ipFamilies", ["IPv6"], "spec.clusterIP", "is IPv4, but spec.ipFamilies[0] is IPv6"),
    (SERVICE, "spec/ipFamilies", ["IPv5"], "spec.ipFamilies[0]", "'IPv5' is not IPv4 or IPv6"),
    (SERVICE, "spec/ipFamilies", ["IPv4", "IPv4"], "spec.ipFamilies", "named twice"),
    (SERVICE, "spec/ipFamilyPolicy", "Dual", "spec.ipFamilyPolicy", "is not SingleStack, PreferDualStack"),
    (SERVICE, "spec/externalIPs", ["203.0.113.1", "0.0.0.0"], "spec.externalIPs[1]", "the unspecified address"),
    (SERVICE, "spec/externalIPs", ["255.255.255.255"], "spec.externalIPs[0]", "the broadcast address"),
    (SERVICE, "spec/externalIPs", ["203.0.113.1/32"], "spec.externalIPs[0]", "is not an IP address"),
    (SERVICE, "spec/externalTrafficPolicy", "local", "spec.externalTrafficPolicy", "is not Cluster or Local"),
    (SERVICE, "spec/internalTrafficPolicy", "Node", "spec.internalTrafficPolicy", "is not Cluster or Local"),
    (SERVICE, "spec/sessionAffinity", "Cookie", "spec.sessionAffinity", "is not None or ClientIP"),
    (SERVICE, "spec/healthCheckNodePort", 65536, "spec.healthCheckNodePort", "is not a port"),
    (SERVICE, "spec/publishNotReadyAddresses", "yes", "spec.publishNotReadyAddresses", "must be true or false"),
    (SERVICE, "spec/loadBalancerClass", "a b", "spec.loadBalancerClass", "is not a label key"),
    (SERVICE, "spec/selector", {"app": "web server"}, "spec.selector[app]", "is not a label value"),
    (SERVICE, "status", {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "vip"}]}}, "status.loadBalancer.ingress[0].ipMode", "VIP or Proxy"),
    # EndpointSlice
    (SLICE, "addressType", GONE, "addressType", "is required: IPv4, IPv6 or FQDN"),
    (SLICE, "addressType", "ipv4", "addressType", "is not IPv4, IPv6 or FQDN"),
    (SLICE, "addressType", "IPv6", "endpoints[0].addresses[0]", "is IPv4, but IPv6 is needed here"),
    (SLICE, "endpoints/0/addresses", ["fd00::1"], "endpoints[0].addresses[0]", "is IPv6, but IPv4 is needed here"),
    (SLICE, "endpoints/0/addresses", ["127.0.0.1"], "endpoints[0].addresses[0]", "'127.0.0.1' is a loopback address"),
    (SLICE, "endpoints/0/addresses", ["0.0.0.0"], "endpoints[0].addresses[0]", "is the unspecified address"),
    (SLICE, "endpoints/0/addresses", ["169.254.1.1"], "endpoints[0].addresses[0]", "is a link-local address"),
    (SLICE, "endpoints/0/addresses", ["224.0.0.1"], "endpoints[0].addresses[0]", "is a multicast address"),
    (SLICE, "endpoints/0/addresses", ["10.64.1.5", "x"], "endpoints[0].addresses[1]", "is not an IP address"),
    (SLICE, "endpoints/0/addresses", "10.64.1.5", "endpoints[0].addresses", "must be a list"),
    (SLICE, "endpoints/0/nodeName", "a;b", "endpoints[0].nodeName", "is not a DNS name"),
    (SLICE, "endpoints/0/zone", "a b", "endpoints[0].zone", "is not a label value"),
    (SLICE, "endpoints/0/hostname", "a.b", "endpoints[0].hostname", "is not a DNS label"),
    (SLICE, "endpoints/0/conditions", {"ready": "true"}, "endpoints[0].conditions.ready", "must be true or false"),
    (SLICE, "endpoints/0/hints", {"forZones": [{}]}, "endpoints[0].hints.forZones[0].name", "is required"),
    (SLICE, "endpoints/0/hints", {"forNodes": [{"name": "A"}]}, "endpoints[0].hints.forNodes[0].name", "DNS name"),
    (SLICE, "endpoints/0/targetRef", {"kind": "Pod", "name": "a b"}, "endpoints[0].targetRef.name", "DNS name"),
    (SLICE, "ports/0/port", 0, "ports[0].port", "is not a port"),
    (SLICE, "ports/0/port", 70000, "ports[0].port", "is not a port"),
    (SLICE, "ports/0/protocol", "HTTP", "ports[0].protocol", "is not TCP, UDP or SCTP"),
    (SLICE, "ports", [{"port": 1}, {"port": 2}], "ports[1].name", "'' is the name of ports[0] already"),
    # Node, ServiceCIDR
    (NODE, "spec/podCIDR", "10.64.1.0", "spec.podCIDR", "is not a CIDR"),
    (NODE, "spec/podCIDRs", ["10.65.0.0/24"], "spec.podCIDRs", "but spec.podCIDR is '10.64.1.0/24'"),
    (NODE, "spec/podCIDRs", ["10.64.1.0/24", "10.65.0.0/24"], "spec.podCIDRs", "at most one CIDR of each IP family"),
    (NODE, "spec/taints", [{"key": "a b"}], "spec.taints[0].key", "is not a label key"),
    (NODE, "spec/taints", [{"effect": "NoSchedule"}], "spec.taints[0].key", "is required"),
    (CIDR, "spec/cidrs", [], "spec.cidrs", "is required"),
    (CIDR, "spec/cidrs", ["10.0.0.0/33"], "spec.cidrs[0]", "is not a CIDR"),
    (CIDR, "spec/cidrs", ["10.0.0.0/8", "11.0.0.0/8"], "spec.cidrs", "at most one CIDR of each IP family"),
    # Pod, Deployment
    (POD, "spec/containers", [], "spec.containers", "is required"),
    (POD, "spec/containers/0/name", GONE, "spec.containers[0].name", "is required"),
    (POD, "spec/containers/0/name", "a;b", "spec.containers[0].name", "is not a DNS label"),
    (POD, "spec/containers/0/ports/0/containerPort", GONE, "spec.containers[0].ports[0].containerPort", "is required"),
    (POD, "spec/containers/0/ports/0/containerPort", 0, "spec.containers[0].ports[0].containerPort", "is not a port"),
    (POD, "spec/containers/0/ports/0/hostPort", 70000, "spec.containers[0].ports[0].hostPort", "is not a port"),
    (POD, "spec/containers/0/ports/0/name", "a_b", "spec.containers[0].ports[0].name", "is not a port name"),
    (POD, "spec/containers/0/ports", [{"containerPort": 1, "name": "a"}, {"containerPort": 2, "name": "a"}], "spec.containers[0].ports[1].name", "already"),
    (POD, "spec/containers", [{"name": "a"}, {"name": "a"}], "spec.containers[1].name", "already"),
    (POD, "spec/nodeName", "a b", "spec.nodeName", "is not a DNS name"),
    (POD, "status", {"podIP": "127.0.0.1"}, "status.podIP", "is a loopback address"),
    (POD, "status", {"podIPs": [{"ip": "x"}]}, "status.podIPs[0].ip", "is not an IP address"),
    (DEPLOYMENT, "spec/replicas", -1, "spec.replicas", "-1 is not a number of pods"),
    (DEPLOYMENT, "spec/selector", GONE, "spec.selector", "is required"),
    (DEPLOYMENT, "spec/template/metadata", {"labels": {"app": "x"}}, "spec.template.metadata.labels", "must hold all"),
    (DEPLOYMENT, "spec/template/spec/containers", [], "spec.template.spec.containers", "is required"),
    # Not the kind it should be
    (SERVICE, "kind", GONE, "kind", "is required"),
    (SERVICE, "apiVersion", 1, "apiVersion", "is required"),
    (SERVICE, "kind", "Servce", "kind", "'Servce' is not a kind of v1; did you mean Service?"),
    (SERVICE, "kind", "Gadget", "kind", "'Gadget' is not a kind of v1"),
    (SLICE, "apiVersion", "discovery.k8s.io/v1beta1", "apiVersion", "has no EndpointSlice; write discovery.k8s.io/v1"),
    (DEPLOYMENT, "apiVersion", "extensions/v1beta1", "apiVersion", "has no Deployment; write apps/v1"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "path", "value", "field", "said"),
    REFUSED,
    ids=lambda value: value["kind"] if isinstance(value, dict) and "kind" in value else None,
)
def test_refused(base, path, value, field, said):
    raw = changed(base, path, value)
    decoded = decode(raw, "web.yaml:7")
    assert decoded.object is None
    found = [problem for problem in decoded.problems if problem.field == field and said in problem.message]
    assert found, decoded.problems
    assert (found[0].origin, found[0].severity) == ("web.yaml:7", "error")
    by_json = decode_json(msgspec.json.encode(raw), "web.yaml:7") if value != 2**70 else decoded
    assert by_json == decoded


def test_the_problem_reads_well():
    (problem,) = decode(changed(SERVICE, "spec/ports/0/port", 70000), "web.yaml:7").problems
    assert str(problem) == "web.yaml:7: error: Service shop/web: spec.ports[0].port: 70000 is not a port (1-65535)"


def test_all_faults_of_an_object_are_named_at_once():
    raw = changed(changed(SERVICE, "spec/ports/0/port", 0), "spec/sessionAffinity", "Cookie")
    assert {problem.field for problem in decode(raw).problems} == {"spec.ports[0].port", "spec.sessionAffinity"}


HARMLESS = {("app", "Web"), ("kubernetes.io~1service-name", "Web"), ("name", LONG), ("nodeName", LONG)}
"""Upper case in a label, and a long name where dots are allowed."""


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    ("base", "path"),
    [
        (SERVICE, "metadata/name"),
        (SERVICE, "metadata/namespace"),
        (SERVICE, "metadata/labels/app"),
        (SERVICE, "spec/ports/0/name"),
        (SERVICE, "spec/ports/0/targetPort"),
        (SERVICE, "spec/ports/0/protocol"),
        (SERVICE, "spec/clusterIP"),
        (SLICE, "metadata/name"),
        (SLICE, "metadata/labels/kubernetes.io~1service-name"),
        (SLICE, "ports/0/name"),
        (SLICE, "endpoints/0/nodeName"),
        (SLICE, "endpoints/0/addresses/0"),
        (NODE, "metadata/name"),
        (NODE, "metadata/labels/app"),
        (POD, "metadata/name"),
        (POD, "spec/containers/0/name"),
        (POD, "spec/containers/0/ports/0/name"),
        (DEPLOYMENT, "metadata/name"),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else value,
)
def test_hostile_text_never_gets_into_an_object(base, path, text):
    last = path.rpartition("/")[2]
    decoded = decode(changed(base, path, text), "web.yaml:1")
    if decoded.object is not None:
        assert (last, text) in HARMLESS
    for problem in decoded.problems:
        assert str(problem).isascii() and str(problem).isprintable(), problem


@pytest.mark.parametrize("raw", [None, 1, "x", [], [SERVICE], {}, {"kind": {}}, {1: 2}, {"metadata": 5}])
def test_things_that_are_no_objects(raw):
    decoded = decode(raw, "web.yaml:3")
    assert decoded.object is None
    assert [problem.severity for problem in decoded.problems] == ["error"]
    assert decoded.problems[0].origin == "web.yaml:3"


def test_a_value_that_holds_itself():
    raw = copy.deepcopy(SERVICE)
    raw["spec"]["selector"] = raw
    assert decode(raw).object is None
    raw["metadata"]["labels"] = loop = {}
    loop["a"] = loop
    assert decode(raw).object is None


def test_kinds_of_others_are_left_alone_with_a_warning():
    for version, kind in [("v1", "ConfigMap"), ("serving.knative.dev/v1", "Service"), ("batch/v1", "Job")]:
        decoded = decode({"apiVersion": version, "kind": kind, "metadata": {"name": "a", "namespace": "b"}})
        assert decoded.object is None
        assert decoded.identity is None
        assert [problem.severity for problem in decoded.problems] == ["warning"]
        assert "is not used here" in decoded.problems[0].message


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"nul", b'{"kind":"Service"}x', b"[" * 100000, b'"\xff"'])
def test_json_that_is_none(text):
    for kind in ("", "Service"):
        decoded = decode_json(text, "watch", kind)
        assert decoded.object is None
        assert decoded.problems[0].severity == "error"


def test_a_full_service():
    raw = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "web",
            "namespace": "shop",
            "labels": {"b": "2", "a": "1", "empty": None},
            "annotations": {"note": "any $text; at all\n"},
            "uid": "u",
            "resourceVersion": "5",
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "managedFields": [{"anything": "unknown is ignored"}],
        },
        "spec": {
            "type": "LoadBalancer",
            "clusterIP": "10.110.0.1",
            "clusterIPs": ["10.110.0.1", "FD6E::0:1"],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "externalIPs": ["203.0.113.9"],
            "loadBalancerSourceRanges": ["198.51.100.7/24"],
            "ports": [
                {"name": "http", "port": 80, "targetPort": "web", "nodePort": 30080, "appProtocol": "h2c"},
                {"name": "dns", "port": 80, "protocol": "UDP", "targetPort": 53},
            ],
            "selector": {"app": "web"},
            "externalTrafficPolicy": "Local",
            "internalTrafficPolicy": "Local",
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}},
            "healthCheckNodePort": 31000,
            "publishNotReadyAddresses": True,
            "allocateLoadBalancerNodePorts": False,
            "loadBalancerClass": "example.com/lb",
            "loadBalancerIP": "203.0.113.1",
            "trafficDistribution": "PreferSameZone",
        },
        "status": {
            "loadBalancer": {
                "ingress": [{"ip": "203.0.113.1"}, {"ip": "203.0.113.2", "ipMode": "Proxy"}, {"hostname": "lb.example"}]
            }
        },
    }
    decoded = decode(raw, "a.yaml:1")
    assert decoded.problems == ()
    assert decoded.identity == ("Service", NamespacedName("shop", "web"))
    assert decoded.object == Service(
        name="web",
        namespace="shop",
        labels=(("a", "1"), ("b", "2"), ("empty", "")),
        annotations=(("note", "any $text; at all\n"),),
        uid="u",
        resource_version="5",
        deletion_timestamp="2026-01-01T00:00:00Z",
        origin="a.yaml:1",
        type="LoadBalancer",
        cluster_ips=("10.110.0.1", "fd6e::1"),
        ip_families=(IPFamily.IPV4, IPFamily.IPV6),
        ip_family_policy="RequireDualStack",
        external_ips=("203.0.113.9",),
        ingress=(LoadBalancerIngress(ip="203.0.113.1"), LoadBalancerIngress(ip="203.0.113.2", proxy=True)),
        ingress_names=("lb.example",),
        source_ranges=("198.51.100.0/24",),
        ports=(
            ServicePort(name="http", port=80, target_port="web", node_port=30080),
            ServicePort(name="dns", port=80, protocol=Protocol.UDP, target_port=53),
        ),
        selector=(("app", "web"),),
        external_policy_local=True,
        internal_policy_local=True,
        affinity_seconds=60,
        health_check_node_port=31000,
        publish_not_ready=True,
        allocate_node_ports=False,
        load_balancer_class="example.com/lb",
        load_balancer_ip="203.0.113.1",
        traffic_distribution="PreferSameZone",
    )


def test_a_full_slice():
    raw = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv6",
        "ports": [{"name": "http", "port": 8080, "protocol": "SCTP"}, {"port": None}],
        "endpoints": [
            {
                "addresses": ["FD64::5"],
                "conditions": {"ready": False, "serving": True, "terminating": True},
                "nodeName": "worker-a.example",
                "zone": "eu-1a",
                "hostname": "web-0",
                "hints": {"forZones": [{"name": "eu-1a"}, {"name": "eu-1b"}], "forNodes": [{"name": "worker-a"}]},
                "targetRef": {"kind": "Pod", "name": "web-0", "namespace": "default"},
            },
            {"addresses": ["fd64::6"], "conditions": {}, "targetRef": {"kind": "Machine", "name": "x y"}},
        ],
    }
    decoded = decode(raw)
    assert decoded.problems == ()
    assert decoded.object == EndpointSlice(
        name="web-1",
        namespace="default",
        labels=(("kubernetes.io/service-name", "web"),),
        service_name="web",
        family=IPFamily.IPV6,
        ports=(EndpointPort(name="http", port=8080, protocol=Protocol.SCTP), EndpointPort()),
        endpoints=(
            SliceEndpoint(
                address="fd64::5",
                ready=False,
                serving=True,
                terminating=True,
                node_name="worker-a.example",
                zone="eu-1a",
                hostname="web-0",
                for_zones=("eu-1a", "eu-1b"),
                for_nodes=("worker-a",),
                target="web-0",
            ),
            SliceEndpoint(address="fd64::6"),
        ),
    )


def test_the_other_kinds():
    node = changed(
        changed(NODE, "metadata/namespace", "x"), "spec/taints", [{"key": "example.com/a", "effect": "NoExecute"}]
    )
    node["status"]["addresses"] += [
        {"type": "ExternalIP", "address": "203.0.113.5"},
        {"type": "Hostname", "address": "a"},
    ]
    assert decode(node).object == Node(
        name="worker-a",
        pod_cidrs=("10.64.1.0/24",),
        internal_ips=("10.20.0.11",),
        external_ips=("203.0.113.5",),
        taints=("example.com/a",),
    )
    assert decode(changed(CIDR, "apiVersion", "networking.k8s.io/v1beta1")).object == ServiceCIDR(
        name="kubernetes", cidrs=("10.110.0.0/16",)
    )
    pod = changed(
        POD, "status", {"phase": "Running", "podIP": "10.64.1.5", "conditions": [{"type": "Ready", "status": "True"}]}
    )
    container = Container(name="web", image="web", ports=(ContainerPort(port=80),))
    assert decode(pod).object == Pod(
        name="web-0",
        namespace="shop",
        spec=PodSpec(containers=(container,)),
        phase="Running",
        ready=True,
        ips=("10.64.1.5",),
    )
    assert decode(DEPLOYMENT).object == Deployment(
        name="web",
        namespace="shop",
        replicas=1,
        selector=(("app", "web"),),
        template_labels=(("app", "web"),),
        template=PodSpec(containers=(Container(name="web"),)),
    )


def test_load_finds_good_objects_between_bad_ones():
    text = b"""apiVersion: v1
kind: Service
metadata: {name: good}
spec:
  ports:
  - port: 80
---
apiVersion: v1
kind: Service
metadata:
  name: bad
spec:
  ports:
  - name: http
    port: 70000
---
{ broken
---
apiVersion: v1
kind: List
items:
- apiVersion: v1
  kind: Service
  metadata: {name: listed}
  spec: {ports: [{port: 80}]}
- apiVersion: v1
  kind: Service
  metadata: {name: listed-bad}
  spec: {ports: [{port: 0}]}
"""
    loaded = load(text, "web.yaml")
    assert [(item.name, item.origin) for item in loaded.objects] == [("good", "web.yaml:1"), ("listed", "web.yaml:22")]
    assert [(problem.origin, problem.object) for problem in loaded.problems] == [
        ("web.yaml:15", "Service default/bad"),
        ("web.yaml:17", ""),
        ("web.yaml:29", "Service default/listed-bad"),
    ]
    assert {key.name for _, key in loaded.refused} == {"bad", "listed-bad"}
    assert not loaded.whole


def test_typed_lists_lend_their_kind():
    raw = {
        "apiVersion": "v1",
        "kind": "ServiceList",
        "items": [{"metadata": {"name": "a"}, "spec": SERVICE["spec"]}, 5],
    }
    loaded = load(msgspec.json.encode(raw), "dump.json")
    assert [item.name for item in loaded.objects] == ["a"]
    assert [problem.message for problem in loaded.problems] == [
        "is a number, not a Kubernetes object: apiVersion, kind, metadata, ..."
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"\x7fELF\x02\x01\x01\x00\xff", "is not UTF-8 text"),
        (b"a: b\n\x00", "is not UTF-8 text (byte 0x00 at offset 5)"),
        (b"\xff\xfea\x00", "is not UTF-8 text"),
        (b"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  labels: {a", "not valid YAML"),
        (b"just text", "is text, not a Kubernetes object"),
    ],
    ids=["empty", "blank", "binary", "nul", "utf-16", "half", "text"],
)
def test_files_that_are_none(data, said):
    loaded = load(data, "web.yaml")
    assert (loaded.objects, loaded.whole) == ((), False)
    assert said in loaded.problems[0].message
    assert loaded.problems[0].severity == "error"
    assert loaded.problems[0].origin.startswith("web.yaml")


def test_a_half_written_service_names_what_is_missing():
    loaded = load(
        b"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - name: a\n    po", "web.yaml"
    )
    assert loaded.objects == () and loaded.problems
    loaded = load(
        b"apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  ports:\n  - name: a\n    port:", "web.yaml"
    )
    assert [str(problem) for problem in loaded.problems] == [
        "web.yaml:8: error: Service default/web: spec.ports[0].port: is required"
    ]


def test_a_file_of_comments_is_no_error():
    loaded = load(b"# all taken out\n---\n", "web.yaml")
    assert loaded.whole and [problem.severity for problem in loaded.problems] == ["warning"]


def test_a_huge_file_is_refused(monkeypatch):
    monkeypatch.setattr("narthex.model.decode.objects.MAX_BYTES", 10)
    assert "at most 10 are read" in load(b"x" * 11, "web.yaml").problems[0].message


def test_a_byte_order_mark_is_nothing():
    assert load("\ufeff".encode() + msgspec.json.encode(SERVICE), "web.json").problems == ()


def test_problem_without_place():
    assert str(Problem(message="m")) == "error: m"


def test_what_kubectl_keeps_for_itself_is_not_kept():
    raw = changed(SERVICE, "metadata/annotations", {"kubectl.kubernetes.io/last-applied-configuration": "{}", "a": "b"})
    assert decode(raw).object.annotations == (("a", "b"),)
