"""net-conf.json: every field, and faults that name field and value."""

import json

import pytest

from narthex.model.net import IPFamily
from narthex.overlay.net_conf import BackendConf, NetConf, NetConfError, parse

NETWORK = {"Network": "10.244.0.0/16"}


def read(**fields):
    return parse(json.dumps(fields).encode(), "net-conf.json")


def test_what_kubeadm_users_have():
    conf = read(**NETWORK, EnableNFTables=False, Backend={"Type": "vxlan"})
    assert conf == NetConf(
        networks=("10.244.0.0/16",),
        subnet_min="10.244.1.0",
        subnet_max="10.244.255.0",
        backend=BackendConf(type="vxlan", vni=1, port=8472),
    )
    assert (conf.network(IPFamily.IPV4), conf.network(IPFamily.IPV6)) == ("10.244.0.0/16", "")


def test_all_fields():
    backend = {"Type": "VXLAN".lower(), "VNI": 4096, "Port": 4789, "MTU": 9000}
    backend |= {"DirectRouting": True, "Learning": True, "GBP": True}
    conf = read(
        Network="10.1.2.3/20",
        IPv6Network="fd00:10::/56",
        EnableIPv4=True,
        EnableIPv6=True,
        EnableNFTables=True,
        SubnetLen=26,
        SubnetMin="10.1.0.64",
        SubnetMax="10.1.15.0",
        IPv6SubnetLen=64,
        IPv6SubnetMin="fd00:10:0:1::",
        IPv6SubnetMax="fd00:10:0:f::",
        Backend=backend,
        SomethingNew=[1],
    )
    assert conf.networks == ("10.1.0.0/20", "fd00:10::/56")
    assert (conf.subnet_length, conf.subnet_min, conf.subnet_max) == (26, "10.1.0.64", "10.1.15.0")
    assert (conf.ipv6_subnet_length, conf.ipv6_subnet_min) == (64, "fd00:10:0:1::")
    assert conf.nftables
    assert conf.backend == BackendConf(vni=4096, port=4789, mtu=9000, direct_routing=True, learning=True, gbp=True)


@pytest.mark.parametrize(
    ("network", "length", "first", "last"),
    [
        ("10.0.0.0/8", 24, "10.0.1.0", "10.255.255.0"),
        ("10.5.0.0/22", 24, "10.5.1.0", "10.5.3.0"),
        ("10.5.0.0/24", 26, "10.5.0.64", "10.5.0.192"),
        ("10.5.0.0/28", 30, "10.5.0.4", "10.5.0.12"),
    ],
)
def test_subnets_as_flannel_works_them_out(network, length, first, last):
    conf = read(Network=network)
    assert (conf.subnet_length, conf.subnet_min, conf.subnet_max) == (length, first, last)


def test_one_family_alone():
    conf = read(EnableIPv4=False, EnableIPv6=True, IPv6Network="fd44::/48")
    assert conf.networks == ("fd44::/48",)
    assert conf.ipv6_subnet_length == 64
    assert read(network="10.0.0.0/8", backend={"type": "host-gw"}).backend.type == "host-gw"
    assert read(**NETWORK, Backend=None).backend.type == "vxlan"
    assert read(**NETWORK, Backend={"Port": 0}).backend.port == 8472


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "Network: is required, since EnableIPv4 is true"),
        ({"Network": "10.0.0.0"}, "Network: '10.0.0.0' is not a CIDR"),
        ({"Network": "fd00::/8"}, "Network: 'fd00::/8' is not a network of IPv4"),
        ({"Network": 5}, "Network: 5 is a number, must be text"),
        ({"Network": "10.0.0.0/30"}, "Network: 10.0.0.0/30 is too small"),
        ({"EnableIPv4": False}, "EnableIPv4: false, and EnableIPv6 is not true"),
        ({**NETWORK, "EnableIPv6": True}, "IPv6Network: is required, since EnableIPv6 is true"),
        ({**NETWORK, "EnableIPv6": "yes"}, 'EnableIPv6: "yes" is text, must be true or false'),
        ({**NETWORK, "SubnetLen": 17}, "SubnetLen: 17 is too short for 10.244.0.0/16"),
        ({**NETWORK, "SubnetLen": 31}, "SubnetLen: 31 must be a whole number from 0 to 30"),
        ({**NETWORK, "SubnetMin": "10.9.0.0"}, "SubnetMin: '10.9.0.0' is not an address in 10.244.0.0/16"),
        ({**NETWORK, "SubnetMax": "10.244.9.1"}, "SubnetMax: 10.244.9.1 does not begin a subnet of length 24"),
        ({**NETWORK, "Backend": "vxlan"}, "Backend: is text, must be an object"),
        (
            {**NETWORK, "Backend": {"Type": "wireguard"}},
            "Backend.Type: 'wireguard' is a backend of flannel that is not built",
        ),
        ({**NETWORK, "Backend": {"Type": "udp"}}, "choose vxlan or host-gw"),
        ({**NETWORK, "Backend": {"Type": "carrier\npigeon"}}, r"Backend.Type: 'carrier\npigeon' is no backend"),
        ({**NETWORK, "Backend": {"VNI": 1 << 24}}, "Backend.VNI: 16777216 must be a whole number from 1 to 16777215"),
        ({**NETWORK, "Backend": {"VNI": True}}, "Backend.VNI: true must be a whole number"),
        ({**NETWORK, "Backend": {"Port": 65536}}, "Backend.Port: 65536 must be"),
        ({**NETWORK, "Backend": {"MTU": 60}}, "Backend.MTU: 60 leaves no room"),
    ],
)
def test_faults(fields, said):
    with pytest.raises(NetConfError) as caught:
        read(**fields)
    assert str(caught.value).startswith("net-conf.json: ")
    assert said in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b"x" * (1 << 21), b"[]"])
def test_what_is_no_configuration(data):
    with pytest.raises(NetConfError, match=r"^net-conf\.json"):
        parse(data, "net-conf.json")
