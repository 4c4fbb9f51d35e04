"""Node objects as places in the overlay; flannel's annotations as flannel writes them."""

import pytest

from narthex.model.decode.objects import load
from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.overlay.annotations import (
    AnnotationKeys,
    LeaseAttributes,
    changed_annotations,
    derived_mac,
    given_public_ip,
    lease_annotations,
    vtep_mac,
)
from narthex.overlay.net_conf import BackendConf, NetConf
from narthex.overlay.peers import NodeNotReadyError, OverlayPeer, node_subnets, overlay_peers, without_conflicts

FOUR, SIX = IPFamily.IPV4, IPFamily.IPV6
CONF = NetConf(networks=("10.244.0.0/16",))
DUAL = NetConf(networks=("10.244.0.0/16", "fd44::/16"))
KEYS = AnnotationKeys()
P = "flannel.alpha.coreos.com/"

FLANNELS = """
apiVersion: v1
kind: Node
metadata:
  name: worker-7
  annotations:
    flannel.alpha.coreos.com/backend-data: '{"VNI":1,"VtepMAC":"8A:2B:1C:00:00:04"}'
    flannel.alpha.coreos.com/backend-type: vxlan
    flannel.alpha.coreos.com/kube-subnet-manager: "true"
    flannel.alpha.coreos.com/public-ip: 192.0.2.44
    node.alpha.kubernetes.io/ttl: "0"
spec:
  podCIDR: 10.244.7.0/24
  podCIDRs: [10.244.7.0/24]
status:
  addresses:
    - {type: InternalIP, address: 198.51.100.7}
"""


def node(name="b", cidrs=("10.244.2.0/24",), ips=("192.0.2.2",), **annotations):
    told = {f"{P}{key.replace('_', '-')}": value for key, value in annotations.items()}
    return Node(name=name, pod_cidrs=cidrs, internal_ips=ips, annotations=tuple(sorted(told.items())))


def managed(name="b", **annotations):
    usual = {"kube_subnet_manager": "true", "backend_type": "vxlan", "public_ip": "192.0.2.2"}
    return node(name, **{**usual, "backend_data": '{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}', **annotations})


def found(*nodes, conf=CONF, assumed=False, own="a"):
    return overlay_peers(nodes, own, conf, KEYS, assumed=assumed)


def test_a_node_that_flannel_runs_on():
    (theirs,) = load(FLANNELS.encode(), "node.yaml").objects
    station = OverlayPeer(
        node="worker-7", family=FOUR, subnet="10.244.7.0/24", public_ip="192.0.2.44", mac="8a:2b:1c:00:00:04"
    )
    assert found(theirs) == ((station,), ())


def test_who_is_none_of_ours():
    assert found(node()) == ((), ())
    assert found(managed(kube_subnet_manager="false")) == ((), ())
    assert found(managed("a")) == ((), ())


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (managed(backend_type="wireguard"), "node b: its backend is wireguard, not vxlan: no route to it"),
        (managed(public_ip="192.0.2"), "public-ip: '192.0.2' is not an address of IPv4"),
        (managed(public_ip="fd00::1"), "is not an address of IPv4"),
        (managed(public_ip=""), "has published no address of IPv4"),
        (managed(backend_data="{"), "backend-data: '{' is not like"),
        (managed(backend_data="[" * 99999), "is not like"),
        (managed(backend_data='{"VtepMAC":"x"}'), "is not like"),
        (managed(backend_data='{"VNI":2,"VtepMAC":"02:00:00:00:00:02"}'), "VNI is 2, but 1 here"),
        (managed(backend_data="null"), "has published no MAC address"),
    ],
)
def test_what_is_wrong_costs_one_node(theirs, said):
    other = managed("c")
    usable, problems = found(theirs, other)
    assert [one.node for one in usable] == ["c"]
    (problem,) = problems
    assert said in problem
    assert problem.startswith("node b: ")


def test_a_peer_has_the_backend_that_it_published():
    direct = NetConf(networks=CONF.networks, backend=BackendConf(type="host-gw"))
    (peer,), (problem,) = found(managed(backend_type="host-gw", backend_data="null"))
    assert peer.mac == ""
    assert "its backend is host-gw, not vxlan: packets to it take host-gw where they can" in problem
    # Of whatever VNI: this node has none any more.
    (peer,), (problem,) = found(managed(backend_data='{"VNI":7,"VtepMAC":"02:00:00:00:00:02"}'), conf=direct)
    assert peer.mac == "02:00:00:00:00:02"
    assert "its backend is vxlan, not host-gw" in problem


def test_pod_ranges_of_others():
    for cidrs, said in (((), "has no network of IPv4"), (("10.9.0.0/24",), "10.9.0.0/24 is not within 10.244.0.0/16")):
        theirs = Node(name="b", pod_cidrs=cidrs, annotations=managed().annotations)
        usable, (problem,) = found(theirs)
        assert not usable
        assert said in problem


def test_without_an_api_server_a_node_needs_no_annotations():
    usable, problems = found(node(), node("c", cidrs=("10.244.3.0/24",), ips=()), assumed=True)
    assert usable == (
        OverlayPeer(
            node="b", family=FOUR, subnet="10.244.2.0/24", public_ip="192.0.2.2", mac=derived_mac("b", 1, FOUR)
        ),
    )
    assert len(problems) == 1 and "node c" in problems[0]
    # What is told counts.
    ((told,), _) = found(managed(public_ip="192.0.2.9"), assumed=True)
    assert (told.public_ip, told.mac) == ("192.0.2.9", "02:00:00:00:00:02")
    ((told,), _) = found(node(public_ip_overwrite="192.0.2.8"), assumed=True)
    assert told.public_ip == "192.0.2.8"


def test_derived_hardware_addresses():
    macs = {derived_mac(name, vni, family) for name in ("a", "b") for vni in (1, 2) for family in (FOUR, SIX)}
    assert len(macs) == 8
    for mac in macs:
        assert int(mac[:2], 16) & 3 == 2
    assert derived_mac("a", 1, FOUR) == "ce:db:e4:e4:bd:b0"


def test_two_families():
    theirs = Node(
        name="b",
        pod_cidrs=("10.244.2.0/24", "fd44:2::/64"),
        annotations=managed(
            public_ipv6="fd02::2", backend_v6_data='{"VNI":1,"VtepMAC":"02:00:00:00:00:06"}'
        ).annotations,
    )
    usable, problems = found(theirs, conf=DUAL)
    assert not problems
    assert [(one.family, one.subnet, one.public_ip, one.mac) for one in usable] == [
        (FOUR, "10.244.2.0/24", "192.0.2.2", "02:00:00:00:00:02"),
        (SIX, "fd44:2::/64", "fd02::2", "02:00:00:00:00:06"),
    ]


def test_the_own_range_is_waited_for():
    assert node_subnets(node("a"), "a", CONF) == {FOUR: "10.244.2.0/24"}
    for own, said in (
        (None, "node a: there is no such Node"),
        (node("a", cidrs=()), "pod cidr not assigned.*--cluster-cidr 10.244.0.0/16"),
        (node("a", cidrs=("10.9.0.0/24",)), "10.9.0.0/24 is not within 10.244.0.0/16"),
        (node("a", cidrs=("10.0.0.0/8",)), "10.0.0.0/8 is not within"),
    ):
        with pytest.raises(NodeNotReadyError, match=said):
            node_subnets(own, "a", CONF)
    with pytest.raises(NodeNotReadyError, match="no network of IPv6"):
        node_subnets(node("a"), "a", DUAL)


def station(name, number, **more):
    fields = {"subnet": f"10.244.{number}.0/24", "public_ip": f"192.0.2.{number}", "mac": f"02:00:00:00:00:0{number}"}
    return OverlayPeer(node=name, family=FOUR, **{**fields, **more})


def conflicts(*theirs):
    return without_conflicts(theirs, "a", {FOUR: "10.244.1.0/24"}, {FOUR: "192.0.2.1"})


def test_all_nodes_have_the_address_of_vagrant():
    usable, problems = conflicts(station("b", 2, public_ip="192.0.2.1"), station("c", 3))
    assert [one.node for one in usable] == ["c"]
    assert len(problems) == 1 and problems[0].startswith("nodes a and b both have the public address 192.0.2.1: ")
    usable, problems = conflicts(station("b", 2), station("c", 3, public_ip="192.0.2.2"))
    # One of them may be gone; who has the address takes what is for it.
    assert [one.node for one in usable] == ["b", "c"]
    assert "nodes b and c both have the public address 192.0.2.2" in problems[0]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"subnet": "10.244.1.0/24"}, "nodes a and b both have pods in 10.244.1.0/24"),
        ({"subnet": "10.244.1.128/25"}, "nodes a and b both have pods in 10.244.1.128/25"),
        ({"subnet": "10.244.3.0/24"}, "nodes b and c both have pods in 10.244.3.0/24"),
        ({"mac": "02:00:00:00:00:03"}, "nodes b and c both have the MAC address 02:00:00:00:00:03"),
    ],
)
def test_of_two_that_claim_the_same_the_first_has_it(more, said):
    usable, problems = conflicts(station("c", 3), station("b", 2, **more))
    assert len(usable) == 1
    assert len(problems) == 1 and said in problems[0]


def test_nothing_is_wrong_with_neighbours():
    theirs = tuple(station(name, number) for number, name in enumerate("bcdef", 2))
    assert conflicts(*reversed(theirs)) == (theirs, ())


def test_the_own_annotations():
    own = {
        FOUR: LeaseAttributes(public_ip="192.0.2.1", mac="02:00:00:00:00:01"),
        SIX: LeaseAttributes(public_ip="fd02::1", mac="02:00:00:00:00:02"),
    }
    assert lease_annotations(KEYS, BackendConf(vni=7), own) == {
        f"{P}kube-subnet-manager": "true",
        f"{P}backend-type": "vxlan",
        f"{P}public-ip": "192.0.2.1",
        f"{P}backend-data": '{"VNI":7,"VtepMAC":"02:00:00:00:00:01"}',
        f"{P}public-ipv6": "fd02::1",
        f"{P}backend-v6-data": '{"VNI":7,"VtepMAC":"02:00:00:00:00:02"}',
    }
    told = lease_annotations(
        AnnotationKeys("my.example/net"), BackendConf(type="host-gw"), {FOUR: LeaseAttributes(public_ip="192.0.2.1")}
    )
    assert told == {
        "my.example/net-kube-subnet-manager": "true",
        "my.example/net-backend-type": "host-gw",
        "my.example/net-public-ip": "192.0.2.1",
        "my.example/net-backend-data": "null",
    }
    have = managed("a", public_ip="192.0.2.9")
    wanted = lease_annotations(
        KEYS, BackendConf(), {FOUR: LeaseAttributes(public_ip="192.0.2.1", mac="02:00:00:00:00:02")}
    )
    assert changed_annotations(have, wanted) == {f"{P}public-ip": "192.0.2.1"}


def test_what_others_wrote_on_the_own_node():
    assert given_public_ip(node(), KEYS, FOUR) == ""
    assert given_public_ip(node(node_public_ip="198.51.100.1"), KEYS, FOUR) == "198.51.100.1"
    both = node(node_public_ip="198.51.100.1", public_ip_overwrite="198.51.100.2", public_ipv6_overwrite="fd00::9")
    assert (given_public_ip(both, KEYS, FOUR), given_public_ip(both, KEYS, SIX)) == ("198.51.100.2", "fd00::9")
    with pytest.raises(ValueError, match="public-ip-overwrite: 'me' is not an address"):
        given_public_ip(node(public_ip_overwrite="me"), KEYS, FOUR)
    assert vtep_mac(managed(), KEYS, FOUR, 1) == "02:00:00:00:00:02"
    assert vtep_mac(node(), KEYS, FOUR, 1) == ""


@pytest.mark.parametrize("prefix", ["", "a b", "nodots", "a.b/c/d", "A.b", "a.b/c\n"])
def test_what_begins_no_annotation(prefix):
    with pytest.raises(ValueError, match="is not an annotation prefix"):
        AnnotationKeys(prefix)
