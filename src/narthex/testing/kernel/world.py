"""The world around one scenario's node, made of network namespaces.

    uplink (eth0) ── servers: what lies beyond the node, remote pods and every address that is no Service's endpoint
        │         └─ clients: who reaches the node from there
      node
        │         ┌─ clients: pods that only send
    pods (cni0) ──┴─ servers: pods that only receive

A site is one namespace behind one of the node's interfaces, and holds any number of addresses. No site holds both ends
of a tested flow: an address that sends and receives has a site of its own. `lay_out` decides this without effects;
`World` makes it. Every interface of the node is a bridge, so that any name a scenario asks for can have any number of
sites behind it, and what comes in has that name to the IP stack. All neighbours are set beforehand and each site's way
to anywhere leads through the node, so a packet takes microseconds and none is lost.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from narthex.linux.links import set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, namespace_names
from narthex.model import EndpointSlice, IPFamily, contains, family_of, host_network
from narthex.testing.kernel import wiring
from narthex.testing.kernel.wiring import LinkRequest
from narthex.testing.scenario import Scenario, ScenarioConnection
from narthex.testing.setting import arrival, from_host, home_interface, pod_interface, uplink

PREFIX = "nxs-"
NODE = -1
"""The node's place in lists of sites."""
_OWN = "nxs-own"
"""The node's link that bears its addresses. They are on no other, so that a masqueraded packet, which gets an address
of the interface it leaves by, never looks like one that kept its source."""
_numbers = itertools.count()

_NODE_SETTINGS = {
    "net/ipv4/ip_forward": "1",
    "net/ipv6/conf/all/forwarding": "1",
    # Several refusals to one client in a second are part of the test, not an attack.
    "net/ipv4/icmp_ratemask": "0",
    "net/ipv6/icmp/ratelimit": "0",
    "net/ipv6/icmp/ratemask": "0",
    # What comes in by a bridge is routed, as on any other interface; br_netfilter would bridge it behind the IP stack.
    "net/bridge/bridge-nf-call-iptables": "0",
    "net/bridge/bridge-nf-call-ip6tables": "0",
}
_SETTINGS = {
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv6/conf/all/disable_ipv6": "0",
    "net/ipv6/conf/default/disable_ipv6": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/default/autoconf": "0",
    "net/ipv6/conf/default/accept_redirects": "0",
    # No link-local addresses: nothing but the scenario's packets on the wire.
    "net/ipv6/conf/default/addr_gen_mode": "1",
}
_SITE_SETTINGS = {
    # A packet that comes back to its sender unmasqueraded must be seen, not thrown away as a martian.
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/default/accept_local": "1",
}
_LOOPBACK_SETTINGS = {"net/ipv4/conf/all/route_localnet": "1", "net/ipv4/conf/default/route_localnet": "1"}


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace behind one of the node's interfaces."""

    interface: str
    addresses: tuple[str, ...]
    loopback_out: bool = False
    """It sends to the node's loopback addresses, which takes routes that no sane host has."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The places of all addresses."""

    node_ips: tuple[str, ...]
    interfaces: tuple[str, ...]
    """The node's; the uplink first."""
    sites: tuple[Site, ...]
    homes: Mapping[str, int]
    """Address to the site that the node's route to it leads to (unless a flow asks for another interface)."""
    senders: Mapping[tuple[str, str], int]
    """Source address and interface to the site that sends."""


def lay_out(scenario: Scenario, connections: tuple[ScenarioConnection, ...]) -> Layout:
    """Place every address of a scenario."""
    sources = {(each.source, arrival(scenario, each)) for each in connections if not from_host(scenario, each)}
    servers = {address for address in _receivers(scenario, connections) if address not in scenario.node_ips}
    at_home = {source for source, interface in sources if interface == home_interface(scenario, source)}
    both = sorted(at_home & servers)
    groups: dict[tuple[str, str], set[str]] = {}
    for address in servers - set(both):
        groups.setdefault((home_interface(scenario, address), "servers"), set()).add(address)
    for source, interface in sources:
        if not (source in both and interface == home_interface(scenario, source)):
            groups.setdefault((interface, "clients"), set()).add(source)
    groups.setdefault((uplink(scenario), "servers"), set())
    groups |= {(home_interface(scenario, address), address): {address} for address in both}
    ordered = sorted(groups, key=lambda key: (key != (uplink(scenario), "servers"), key))
    to_loopback = {
        (each.source, arrival(scenario, each))
        for each in connections
        if contains(family_of(each.destination).loopback, each.destination)
    }
    sites = tuple(
        Site(
            interface=key[0],
            addresses=tuple(sorted(groups[key])),
            loopback_out=any((address, key[0]) in to_loopback for address in groups[key]),
        )
        for key in ordered
    )
    homes: dict[str, int] = {}
    senders: dict[tuple[str, str], int] = {}
    for number, key in enumerate(ordered):
        for address in groups[key]:
            natural = key[0] == home_interface(scenario, address)
            if address not in homes or natural:
                homes[address] = number
            if key[1] != "servers":
                senders[address, key[0]] = number
    interfaces = dict.fromkeys((uplink(scenario), pod_interface(scenario), *(site.interface for site in sites)))
    return Layout(node_ips=scenario.node_ips, interfaces=tuple(interfaces), sites=sites, homes=homes, senders=senders)


def _receivers(scenario: Scenario, connections: tuple[ScenarioConnection, ...]) -> set[str]:
    """Return every address at which a packet may end: endpoints, and destinations that no rule rewrites."""
    found = {
        endpoint.address
        for obj in scenario.objects
        if isinstance(obj, EndpointSlice) and obj.family is not None
        for endpoint in obj.endpoints
        if endpoint.address
    }
    found.update(each.destination for each in connections)
    return {address for address in found if not contains(family_of(address).loopback, address)}


def gateway(interface: int, family: IPFamily) -> str:
    """Return the node's own address on its n-th interface, outside of every scenario's address plan."""
    return f"100.127.{interface}.1" if family is IPFamily.IPV4 else f"fdff:6e78::{interface + 1:x}:1"


def gateways(layout: Layout) -> frozenset[str]:
    """Return all interface addresses of the node: the possible sources of masqueraded packets."""
    return frozenset(gateway(number, family) for number in range(len(layout.interfaces)) for family in IPFamily)


def _bridge_mac(interface: int) -> str:
    return f"02:6e:78:00:{interface:02x}:01"


def _site_mac(site: int) -> str:
    return f"02:6e:78:01:{site:02x}:02"


def node_wires(layout: Layout, namespaces: list[str]) -> list[LinkRequest]:
    """Return the requests for the node's bridges, ports, addresses, and routes."""
    made = []
    for number, name in enumerate(layout.interfaces):
        made.append(wiring.bridge(name, _bridge_mac(number)))
        made += [wiring.bear(gateway(number, family), name) for family in IPFamily]
    made.append(wiring.bridge(_OWN))
    made += [wiring.bear(ip, _OWN) for ip in layout.node_ips]
    for number, site in enumerate(layout.sites):
        made.append(wiring.veth(f"nxs-{number}", site.interface, "eth0", _site_mac(number), namespaces[number]))
    for address, number in sorted(layout.homes.items()):
        made += way_to(layout, address, number)
    beyond = layout.interfaces[0]
    for via, everything in (("100.127.255.254", "0.0.0.0/0"), ("fdff:6e78::ffff:fffe", "::/0")):
        made += [wiring.neighbour(via, _site_mac(0), beyond), wiring.route(everything, beyond, via)]
    return made


def way_to(layout: Layout, address: str, site: int) -> list[LinkRequest]:
    """Return the requests that route an address to a site."""
    interface = layout.sites[site].interface
    return [wiring.route(host_network(address), interface), wiring.neighbour(address, _site_mac(site), interface)]


def site_wires(layout: Layout, number: int) -> list[LinkRequest]:
    """Return the requests for the link, the addresses, and the routes of one site."""
    site = layout.sites[number]
    interface = layout.interfaces.index(site.interface)
    made = [wiring.up("eth0"), *(wiring.bear(address, "lo") for address in site.addresses)]
    for family in IPFamily:
        via = gateway(interface, family)
        everything = "0.0.0.0/0" if family is IPFamily.IPV4 else "::/0"
        made += [wiring.neighbour(via, _bridge_mac(interface), "eth0"), wiring.route(everything, "eth0", via)]
    if site.loopback_out:
        made += [wiring.not_local("127.0.0.0/8"), wiring.not_local("127.0.0.1/32")]
        made.append(wiring.route("127.0.0.0/8", "eth0", gateway(interface, IPFamily.IPV4)))
    return made


class World:
    """The namespaces of one layout, which exist inside a `with` block."""

    def __init__(self, layout: Layout) -> None:
        base = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.layout = layout
        self.node = base
        """Name of the node's namespace."""
        self.sites = [f"{base}-{number}" for number in range(len(layout.sites))]
        """Names of the sites' namespaces."""
        self._turned: dict[str, int] = dict(layout.homes)

    def namespace(self, site: int) -> str:
        """Return the namespace of a site or of the node."""
        return self.node if site == NODE else self.sites[site]

    def __enter__(self) -> World:
        _alive.add(self)
        try:
            for name in (self.node, *self.sites):
                create_namespace(name)
            set_sysctls(self.node, {**_SETTINGS, **_NODE_SETTINGS})
            for number, name in enumerate(self.sites):
                extra = _LOOPBACK_SETTINGS if self.layout.sites[number].loopback_out else {}
                set_sysctls(name, {**_SETTINGS, **_SITE_SETTINGS, **extra})
            wiring.wire(self.node, node_wires(self.layout, self.sites))
            for number, name in enumerate(self.sites):
                wiring.wire(name, site_wires(self.layout, number))
            wiring.forwarding(self.node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all namespaces; safe at any time."""
        for name in (self.node, *self.sites):
            delete_namespace(name)
        _alive.discard(self)

    def turn_to(self, source: str, interface: str) -> None:
        """Route a source through the interface by which it sends."""
        site = self.layout.senders[source, interface]
        if self._turned.get(source) != site:
            wiring.wire(self.node, way_to(self.layout, source, site))
            self._turned[source] = site

    def turn_home(self, addresses: Iterable[str]) -> None:
        """Undo `turn_to` for addresses that are about to receive."""
        for address in addresses:
            home = self.layout.homes.get(address)
            if home is not None and self._turned.get(address) != home:
                wiring.wire(self.node, way_to(self.layout, address, home))
                self._turned[address] = home

    def lend(self, address: str) -> None:
        """Give the node an address, like a host that has a load balancer's address bound."""
        wiring.wire(self.node, [wiring.bear(address, _OWN)])

    def take_back(self, address: str) -> None:
        """Undo `lend`."""
        wiring.wire(self.node, [wiring.drop(address, _OWN)])


_alive: set[World] = set()


@atexit.register
def close_all() -> None:
    """Remove the namespaces of every world of this process."""
    for world in list(_alive):
        world.close()


def sweep() -> None:
    """Remove namespaces that a killed run left behind."""
    for name in namespace_names():
        pid = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            delete_namespace(name)
