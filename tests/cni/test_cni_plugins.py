"""What the plugins make of their configurations, without a machine."""

import importlib
import inspect
import json

import pytest

from narthex.cni import request, result
from narthex.cni.errors import CniError
from narthex.cni.plugins import bridge, portmap, ptp
from narthex.cni.plugins import iptables as chains
from narthex.cni.program import flannel, run
from narthex.cni.result import CniResult, IPConfig
from narthex.model.links import (
    AddAddress,
    AddPortVlans,
    AddRoute,
    DeleteAddress,
    DeletePortVlan,
    DeleteRoute,
    SetHardwareAddress,
)
from narthex.model.values import address_number, packed_address, packed_network

MADE = bridge.VethIdentity(
    "veth01", bytes.fromhex("020000000001"), bytes.fromhex("020000000002"), bytes.fromhex("020000000003")
)


def asked(plugin, **config):
    environment = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "abc", "CNI_NETNS": "/n", "CNI_IFNAME": "eth0"}
    return request.read(plugin, environment, json.dumps({"cniVersion": "1.0.0", "name": "net", **config}).encode())


def given(*cidrs, routes=()):
    ips = []
    for cidr in cidrs:
        network = packed_network(cidr)
        ips.append(IPConfig(network, (address_number(network.first) + 1).to_bytes(len(network.address), "big")))
    return CniResult((), tuple(ips), routes)


def test_bridge_wishes():
    req = asked("bridge", isDefaultGateway=True, mtu=1400, hairpinMode=True, ipam={"type": "host-local"})
    config = bridge.read(req)
    done = bridge.completed(config, given("10.0.0.5/24", "fd00::5/64"), req)
    assert [str(route.destination) for route in done.routes] == ["0.0.0.0/0", "::/0"]
    wanted = bridge.plan(config, done, bridge.BridgeState(), MADE, "eth0")
    assert [type(one).__name__ for one in wanted.node] == [
        "AddBridge",
        "AddVeth",
        "PortFlags",
        "AddAddress",
        "AddAddress",
    ]
    assert [type(one).__name__ for one in wanted.pod] == ["AddAddress", "SetUp", "AddAddress", "AddRoute", "AddRoute"]
    assert {setting.path for setting in wanted.late_settings} >= {"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"}
    assert wanted.announce == (SetHardwareAddress("eth0", MADE.pod_mac),)
    again = bridge.plan(
        config,
        done,
        bridge.BridgeState(
            "bridge", b"123456", 1500, tuple(wish.network for wish in wanted.node if isinstance(wish, AddAddress))
        ),
        MADE,
        "eth0",
    )
    assert [type(one).__name__ for one in again.node] == ["AddVeth", "PortFlags", "ForgetNeighbour", "ForgetNeighbour"]


def test_neighbours_by_the_node():
    req = asked("bridge", isDefaultGateway=True, throughNode=True, ipam={"type": "host-local"})
    config = bridge.read(req)
    done = bridge.completed(config, given("10.0.0.5/24", "fd00::5/64"), req)
    wanted = bridge.plan(config, done, bridge.BridgeState(), MADE, "eth0")
    assert not any(one.connected for one in wanted.pod if isinstance(one, AddAddress))
    routes = [(str(one.destination), one.gateway) for one in wanted.pod if isinstance(one, AddRoute)]
    four, six = packed_address("10.0.0.1"), packed_address("fd00::1")
    assert routes == [
        *(("10.0.0.1/32", b""), ("10.0.0.0/24", four)),
        *(("fd00::1/128", b""), ("fd00::/64", six)),
        *(("0.0.0.0/0", four), ("::/0", six)),
    ]
    # Nobody tells the pod of the shorter way.
    off = {setting.path for setting in wanted.pod_settings if setting.value == "0"}
    assert off >= {f"net/{name}/accept_redirects" for name in ("ipv4/conf/all", "ipv4/conf/eth0", "ipv6/conf/eth0")}


def test_a_default_route_of_ipam_stays_the_only_one():
    req = asked("bridge", isDefaultGateway=True, ipam={"type": "host-local"})
    route = result.PodRoute(packed_network("0.0.0.0/0"), packed_address("10.0.0.9"))
    done = bridge.completed(bridge.read(req), given("10.0.0.5/24", routes=(route,)), req)
    assert done.routes == (route,)


def test_another_address_on_the_bridge():
    req = asked("bridge", isGateway=True, ipam={"type": "host-local"})
    done = bridge.completed(bridge.read(req), given("10.0.0.5/24", "fd00::5/64"), req)
    near = bridge.BridgeState("bridge", b"123456", 1500, (packed_network("fd01::1/64"),))
    assert len(bridge.plan(bridge.read(req), done, near, MADE, "eth0").node) == 6
    for has in ("10.1.0.1/24", "fd00::9/48"):
        state = bridge.BridgeState("bridge", b"123456", 1500, (packed_network(has),))
        with pytest.raises(CniError, match=has.partition("/")[0]):
            bridge.plan(bridge.read(req), done, state, MADE, "eth0")
        forced = bridge.read(asked("bridge", isGateway=True, forceAddress=True, ipam={"type": "host-local"}))
        wanted = bridge.plan(forced, done, state, MADE, "eth0").node
        assert DeleteAddress("cni0", packed_network(has)) in wanted


@pytest.mark.parametrize(
    "config, code, words",
    [
        ({"hairpinMode": True, "promiscMode": True}, 7, "same time"),
        ({"vlan": 4095}, 7, "vlan: must be a whole number from 0 to 4094"),
        ({"vlan": 1, "bridge": "b" * 14, "isGateway": True}, 7, "more than 15 bytes"),
        ({"vlanTrunk": [{"minID": 2}]}, 7, "vlanTrunk[0]: needs both minID and maxID"),
        ({"vlanTrunk": [{"id": 2}, {"minID": 5, "maxID": 4}]}, 7, "vlanTrunk[1].minID: 5 is greater than maxID 4"),
        ({"vlanTrunk": [{"id": 0}]}, 7, "vlanTrunk[0].id"),
        ({"macspoofchk": True}, 2, "macspoofchk"),
        ({"disableContainerInterface": True, "ipam": {"type": "host-local"}}, 7, "IPAM"),
        ({"bridge": "a/b"}, 7, "interface name"),
        ({"bridge": "b" * 16}, 7, "interface name"),
        ({"mtu": -1}, 7, "mtu"),
        ({"mtu": "1500"}, 7, "mtu"),
        ({"isGateway": "yes"}, 7, "isGateway"),
        ({"throughNode": True}, 7, "throughNode: needs isGateway"),
        ({"ipMasqBackend": "ebpf"}, 7, "ipMasqBackend"),
        ({"ipam": "host-local"}, 7, "ipam"),
        ({"runtimeConfig": {"mac": "01:00:00:00:00:00"}}, 7, "hardware address"),
        ({"runtimeConfig": {"mac": "02:00:00:00:00"}}, 7, "hardware address"),
    ],
)
def test_bridge_refuses(config, code, words):
    with pytest.raises(CniError) as caught:
        bridge.read(asked("bridge", **config))
    assert caught.value.code == code and words in caught.value.message


TRUNK = [{"id": 7}, {"minID": 10, "maxID": 12}, {}]


@pytest.mark.parametrize(
    "config, default_vlan, changes",
    [
        ({}, 1, []),
        ({"preserveDefaultVlan": True}, 1, []),
        ({"vlan": 5}, 1, ["-1", "5*"]),
        ({"vlan": 5}, 0, ["5*"]),
        ({"vlan": 5, "preserveDefaultVlan": True}, 1, ["5*"]),
        ({"vlan": 5, "vlanTrunk": TRUNK}, 9, ["-9", "5*", "7", "10", "11", "12"]),
        ({"vlanTrunk": TRUNK}, 1, ["-1", "7", "10", "11", "12", "1*"]),
        ({"vlanTrunk": []}, 1, []),
    ],
)
def test_vlans_of_a_port(config, default_vlan, changes):
    """In this order; `*` marks the VLAN of untagged packets, `-` one that is left."""
    state = bridge.BridgeState("bridge", b"123456", 1500, default_vlan=default_vlan)
    read = bridge.read(asked("bridge", **config))
    found = []
    for one in bridge.plan(read, CniResult(), state, MADE, "eth0").node:
        if isinstance(one, DeletePortVlan):
            found.append(f"-{one.number}")
        elif isinstance(one, AddPortVlans):
            found += [f"{vlan.number}{'*' * vlan.native}" for vlan in one.vlans]
    assert found == changes
    assert read.filtering is bool(config.keys() & {"vlan", "vlanTrunk"})


def test_the_work_of_each_plugin_is_there():
    assert {*run.COMMAND_HANDLERS, "flannel"} == set(run.PLUGINS)
    for plugin, (module, functions) in run.COMMAND_HANDLERS.items():
        found = importlib.import_module(f"narthex.cni.program.{module}")
        for command, name in functions.items():
            assert command in request.COMMANDS
            assert list(inspect.signature(getattr(found, name)).parameters) == ["node", "request"], (plugin, name)


def test_ptp_routes_all_by_the_gateway():
    req = asked("ptp", ipam={"type": "host-local"})
    done = ptp.completed(given("10.0.0.5/24"), req)
    wanted = ptp.plan(ptp.read(req), done, MADE, "eth0")
    assert DeleteRoute("eth0", packed_network("10.0.0.0/24")) in wanted.pod
    routes = [(str(one.destination), one.gateway) for one in wanted.pod if isinstance(one, AddRoute)]
    assert routes == [("10.0.0.1/32", b""), ("10.0.0.0/24", packed_address("10.0.0.1"))]
    with pytest.raises(CniError, match="gateway"):
        ptp.completed(CniResult((), (IPConfig(packed_network("10.0.0.5/24")),)), req)
    with pytest.raises(CniError, match="no address"):
        ptp.completed(CniResult(), req)
    for without in ({}, {"ipam": {}}, {"ipam": None}):
        with pytest.raises(CniError, match=r"ipam\.type"):
            ptp.read(asked("ptp", **without))


def ports(*mappings, **config):
    return portmap.read(asked("portmap", runtimeConfig={"portMappings": list(mappings)}, **config))


WEB = {"hostPort": 8080, "containerPort": 80}
POD = portmap.PortmapTarget(
    (packed_address("10.0.0.5"), packed_address("fd00::5")), ("10.0.0.0/24", "fd00::/64"), ("cni0",)
)


def test_elements_of_a_host_port():
    names = [one.set for one in portmap.elements(ports(WEB), POD)]
    assert names == ["ports4", "loopback4", "hairpin4", "self4", "ports6", "hairpin6", "self6"]
    assert [one.set for one in portmap.elements(ports(WEB, snat=False), POD)] == ["ports4", "ports6"]
    assert [one.set for one in portmap.elements(ports(WEB, masqAll=True), POD)] == ["ports4", "all4", "ports6", "all6"]
    first = portmap.elements(ports(WEB), POD)[0]
    assert first.exclusive and first.key == b"\x06\0\0\0\x1f\x90\0\0" and first.data == b"\x0a\0\0\5\0\x50\0\0"


@pytest.mark.parametrize(
    "host_ip, sets",
    [
        ("192.0.2.1", ["bound4"]),
        ("0.0.0.0", ["ports4"]),
        ("2001:db8::1", ["bound6"]),
        ("::", ["ports6"]),
        ("::ffff:192.0.2.1", ["bound4"]),
    ],
)
def test_a_host_address_is_of_one_family(host_ip, sets):
    found = portmap.elements(ports(WEB | {"hostIP": host_ip}, snat=False), POD)
    assert [one.set for one in found] == sets


def test_two_host_ports_may_lead_to_one():
    found = portmap.elements(ports(WEB, WEB | {"hostPort": 9090}), POD)
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "mappings, config, code, words",
    [
        ([WEB | {"hostPort": 0}], {}, 7, "hostPort"),
        ([WEB | {"containerPort": 70000}], {}, 7, "containerPort"),
        ([{"hostPort": 80}], {}, 7, "containerPort"),
        ([WEB | {"protocol": "icmp"}], {}, 7, "protocol"),
        ([WEB | {"hostIP": "host"}], {}, 7, "hostIP"),
        (["8080:80"], {}, 7, "object"),
        ([], {"markMasqBit": 32}, 7, "markMasqBit"),
        ([], {"markMasqBit": 1, "externalSetMarkChain": "X"}, 7, "cannot specify"),
        ([], {"externalSetMarkChain": "a b"}, 7, "chain"),
        ([], {"externalSetMarkChain": "KUBE-MARK-MASQ", "backend": "nftables"}, 2, "iptables backend"),
        ([], {"conditionsV4": ["-s", "10.0.0.0/8"], "backend": "nftables"}, 2, "iptables backend"),
        ([], {"conditionsV4": ['"', "-j"]}, 7, "part of a rule"),
        ([], {"conditionsV4": ["a\nCOMMIT"]}, 7, "part of a rule"),
        ([], {"conditionsV6": ["-j", "DROP"]}, 7, "no match"),
        ([], {"backend": "pf"}, 7, "backend"),
    ],
)
def test_portmap_refuses(mappings, config, code, words):
    with pytest.raises(CniError) as caught:
        ports(*mappings, **config)
    assert caught.value.code == code and words in caught.value.message


def test_conditions_are_quoted():
    config = ports(WEB, conditionsV4=["-s", "10.0.0.0/8"])
    text = chains.ports("net", "abc", config, POD, 4, "")
    assert config.backend == "iptables"
    assert ' "-s" "10.0.0.0/8" -j CNI-DN-' in text


def test_chains_are_named_like_the_reference():
    # seen on a node with the reference's plugins
    assert chains.ports_chain("net", "a") == "CNI-DN-c3a99edf74e2fcceab44d"


ENV = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"


def test_flannel_delegates():
    req = asked("flannel", delegate={"isDefaultGateway": True}, runtimeConfig={"mac": "02:00:00:00:00:01"})
    made = flannel.as_request(req, flannel.delegate_config(req, flannel.read_subnet_env(ENV, "env")))
    assert made.plugin == "bridge" and made.network == "net"
    assert made.config == {
        "name": "net",
        "type": "bridge",
        "cniVersion": "1.0.0",
        "isDefaultGateway": True,
        "isGateway": True,
        "ipMasq": True,
        "mtu": 1450,
        "runtimeConfig": {"mac": "02:00:00:00:00:01"},
        "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.3.0/24"}]], "routes": [{"dst": "10.244.0.0/16"}]},
    }


def test_flannel_keeps_what_the_delegate_says():
    req = asked("flannel", delegate={"type": "ptp", "mtu": 1300, "ipMasq": False})
    made = flannel.delegate_config(req, flannel.read_subnet_env(ENV, "env"))
    assert (made["type"], made["mtu"], made["ipMasq"], made.get("isGateway")) == ("ptp", 1300, False, None)


@pytest.mark.parametrize(
    "config",
    [
        {"delegate": {"name": "x"}},
        {"delegate": {"ipam": {}}},
        {"delegate": {"type": "../sh"}},
        {"delegate": {"type": "flannel"}},
    ],
)
def test_flannel_refuses(config):
    req = asked("flannel", **config)
    with pytest.raises(CniError):
        flannel.as_request(req, flannel.delegate_config(req, flannel.read_subnet_env(ENV, "env")))


@pytest.mark.parametrize("line", ENV.splitlines())
def test_flannel_says_what_is_missing(line):
    with pytest.raises(CniError, match=line.partition("=")[0]):
        flannel.read_subnet_env(ENV.replace(line, ""), "env")


@pytest.mark.parametrize("version", request.VERSIONS)
def test_results_are_read_back_in_every_version(version):
    interfaces = () if version < "0.3" else (result.Interface("eth0", "02:00:00:00:00:01", "/n"),)
    where = 0 if interfaces else None
    ips = tuple(IPConfig(ip.network, ip.gateway, where) for ip in given("10.0.0.5/24", "fd00::5/64").ips)
    routes = (
        result.PodRoute(packed_network("0.0.0.0/0"), packed_address("10.0.0.1")),
        result.PodRoute(packed_network("::/0")),
    )
    one = CniResult(interfaces, ips, routes, result.DNSConfig(("10.0.0.10",), "", ("a.example",), ("ndots:5",)))
    assert result.read(json.loads(json.dumps(result.write(one, version))), "") == one
