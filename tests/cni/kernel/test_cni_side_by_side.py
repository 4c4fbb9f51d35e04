"""Our plugins and the reference plugins, given the same requests: what differs is what the documentation lists."""

from typing import Any

import pytest
from tests.cni.kernel.side_by_side import Ask, Case, differences

pytestmark = pytest.mark.kernel

IPAM4 = {"type": "host-local", "dataDir": "DATA", "subnet": "10.77.0.0/24", "routes": [{"dst": "0.0.0.0/0"}]}
IPAM = {
    "type": "host-local",
    "dataDir": "DATA",
    "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "fd77::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
}
OTHER = {**IPAM4, "subnet": "10.78.0.0/24"}
TWO = {**IPAM, "ranges": [[{"subnet": "10.77.0.0/24"}], [{"subnet": "10.78.0.0/24"}]], "routes": []}
STATIC = {"type": "static", "addresses": [{"address": "10.77.0.7/24"}]}
ABSENT: Any = object()


def bridge(**options: Any) -> dict[str, Any]:
    config = {"cniVersion": "1.0.0", "name": "net", "type": "bridge", "bridge": "cni0", "isGateway": True, "ipam": IPAM}
    return {name: value for name, value in (config | options).items() if value is not ABSENT}


def ptp(**options: Any) -> dict[str, Any]:
    return bridge(**{"type": "ptp", "bridge": ABSENT, "isGateway": ABSENT} | options)


def host_local(**options: Any) -> dict[str, Any]:
    return bridge(type="host-local", **options)


def add(config: dict[str, Any], pod: str = "a") -> Ask:
    return Ask("ADD", config, pod)


def delete(config: dict[str, Any]) -> Ask:
    return Ask("DEL", config)


def check(config: dict[str, Any]) -> Ask:
    return Ask("CHECK", config, chain=True)


def chained(plugin: str, **options: Any) -> Ask:
    return Ask("ADD", bridge(type=plugin, **options), chain=True)


def existing(*commands: str, options: str = "", up: bool = True) -> tuple[str, ...]:
    """Make the bridge before the first request."""
    return (f"link add cni0 type bridge {options}", *commands, *(["link set cni0 up"] if up else []))


HAS_OTHER, HAS_SAME = "addr add 10.66.0.1/24 dev cni0", "addr add 10.77.0.1/24 dev cni0"
FORCE = bridge(forceAddress=True)
PORT = {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}
BRIDGE_MAC = ("/0 ADD/result/interfaces/0/mac", "/node/links/cni0/mac")
"""Without gateway addresses, the reference plugin leaves the bridge the lowest hardware address of its ports."""
V4_ONLY = ("/a/settings/net/ipv6/conf/eth0/accept_dad",)
PTP = ("/a/settings/net/ipv4/conf/eth0/arp_notify",)

CASES = {
    "a pod's whole life": Case((add(bridge()), check(bridge()), delete(bridge()), delete(bridge()))),
    "masquerading": Case((add(bridge(ipMasq=True, ipMasqBackend="iptables")),)),
    "bridge with another address": Case((add(bridge()),), existing(HAS_OTHER)),
    "bridge with another prefix length": Case((add(bridge()),), existing("addr add 10.77.0.1/16 dev cni0")),
    "bridge with another address, replaced": Case((add(FORCE),), existing(HAS_OTHER)),
    "bridge with another address first": Case((add(bridge()),), existing(HAS_OTHER, HAS_SAME)),
    "bridge with another address first, replaced": Case((add(FORCE),), existing(HAS_OTHER, HAS_SAME)),
    "bridge with another address second": Case((add(FORCE),), existing(HAS_SAME, HAS_OTHER)),
    "bridge with an overlapping IPv6 address": Case((add(bridge()),), existing("addr add fd77::9/48 dev cni0 nodad")),
    "bridge with a distinct IPv6 address": Case((add(bridge()),), existing("addr add fd78::9/64 dev cni0 nodad")),
    "bridge with an address of scope link": Case((add(bridge()),), existing(f"{HAS_OTHER} scope link")),
    "bridge with a secondary address, replaced": Case(
        (add(FORCE),), existing(HAS_OTHER, "addr add 10.66.0.2/24 dev cni0"), differ=("/0 ADD/status",)
    ),
    "bridge that is down": Case((add(bridge()),), existing(up=False)),
    "bridge with STP": Case((add(bridge()), check(bridge())), existing(options="stp_state 1")),
    "bridge of another size": Case((add(bridge()),), existing("link set cni0 mtu 1300")),
    "bridge of somebody else, no gateway": Case((add(bridge(isGateway=False)),), existing()),
    "two networks of one family": Case((add(bridge(ipam=TWO)),)),
    "two networks of one family, replaced": Case((add({**FORCE, "ipam": TWO}),), differ=V4_ONLY),
    "promiscuous mode": Case((add(bridge(promiscMode=True)), check(bridge(promiscMode=True)), check(bridge()))),
    "bridge without ipam": Case((add(bridge(ipam=ABSENT)), delete(bridge(ipam=ABSENT))), differ=BRIDGE_MAC),
    "check of a bridge without ipam": Case(
        (add(bridge(ipam=ABSENT)), check(bridge(ipam=ABSENT))), differ=("/1 CHECK/status",)
    ),
    "ptp without ipam": Case((add(ptp(ipam=ABSENT)), add(ptp(ipam={})), check(ptp(ipam=ABSENT)))),
    "ptp without ipam, DEL": Case((delete(ptp(ipam=ABSENT)),), differ=("/0 DEL/status",)),
    "host-local without ipam": Case(
        (add(host_local(ipam=ABSENT)), delete(host_local(ipam=ABSENT)), check(host_local(ipam=ABSENT)))
    ),
    "host-local without type": Case((add(host_local(ipam={key: IPAM[key] for key in IPAM if key != "type"})),)),
    "ptp": Case((add(ptp(ipam=IPAM4)), check(ptp(ipam=IPAM4))), differ=PTP),
    "ptp with a route by a neighbor": Case(
        (add(ptp(ipam={**IPAM4, "routes": [{"dst": "10.0.0.0/8", "gw": "10.77.0.9"}]})),), differ=PTP
    ),
    "static addresses without gateway": Case((add(bridge(ipam=STATIC)),), differ=V4_ONLY),
    "old reservations": Case((delete(host_local()),), leases={"10.77.0.5": "a", "fd77::5": " a \r\n"}),
    "old reservations of a bridge": Case((delete(bridge()),), leases={"10.77.0.5": "a", "fd77::5": "b"}),
    "old and new reservations": Case((delete(host_local()),), leases={"10.77.0.5": "a", "fd77::5": "a\r\neth0"}),
    "old and new reservations, twice": Case((delete(host_local()),) * 2, leases={"10.77.0.5": "a", "::5": "a\r\neth0"}),
    "reservations of another interface": Case((delete(host_local()),), leases={"10.77.0.5": "a\r\neth1"}),
    "check of old reservations": Case((check(host_local()),), leases={"10.77.0.5": "a"}),
    "ADD beside old reservations": Case((add(host_local()),), leases={"10.77.0.5": "a"}),
    "the next address": Case((add(host_local()),), leases={"last_reserved_ip.0": "10.77.0.200", "10.77.0.201": "b"}),
    "host port": Case((add(bridge()), chained("portmap", backend="iptables", runtimeConfig=PORT))),
    "chain of other plugins": Case(
        (add(bridge()), chained("tuning", mtu=1300, promisc=True), chained("firewall"), chained("sbr"))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_side_by_side(name, tmp_path):
    case = CASES[name]
    assert differences(case, tmp_path) == sorted(case.differ)
