"""Signs that elements of kube-proxy's nft maps and sets are missing from a copied text.

A print has an element on each line, so that a text may lack any of them. Chains, other maps, and the comments of elements show
which elements kube-proxy has written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from narthex.netfilter import ast
from narthex.netfilter.walk.structure import (
    CLUSTER_IPS,
    CLUSTER_IPS_CHECK,
    HAIRPINS,
    MASQUERADE_BIT,
    SERVICE_IPS,
    SERVICE_PORT_CHAINS,
)

MISSING = "lines of the input are missing"
_NO_ENDPOINTS = "no-endpoint-services"
_NO_NODE_PORTS = "no-endpoint-nodeports"
_NODE_PORTS = "service-nodeports"
_FIREWALL = "firewall-ips"
_KEY_PARTS = {
    CLUSTER_IPS: 1,
    SERVICE_IPS: 3,
    HAIRPINS: 4,
    _NO_ENDPOINTS: 3,
    _NO_NODE_PORTS: 2,
    _NODE_PORTS: 2,
    _FIREWALL: 3,
}
"""Number of values in a key. Anybody can write sets of these names with other keys, which show nothing."""


class _Endpoint(NamedTuple):
    """An endpoint that a chain of a Service port sends to."""

    address: str
    port: int
    protocol: str
    local: bool
    """The chain has only endpoints of the node."""


class ElementSigns:
    """Finds in kube-proxy's nft table what shows that elements are missing.

    Args:
        table: The table.
        names: The chains of Services and endpoints to look at.
    """

    def __init__(self, table: ast.Table, names: list[str]) -> None:
        self._table = table
        self._names = names

    @cached_property
    def lost(self) -> str:
        """The first sign that an element is missing, or ""."""
        frontends = (self._lacks(*each) for each in self._lost_frontends)
        return self._lost_cluster_ip() or self._lost_service_port() or next(frontends, "")

    def doubtful(self, chain: ast.Chain) -> Iterator[ast.Rule]:
        """Yield what a packet in a chain assumes, or cannot know, because an element may be missing."""
        if chain.name == "services":
            yield from self._lost_dispatch()
        elif chain.name == "masquerading":
            yield from self._hairpins()
        elif chain.name == CLUSTER_IPS_CHECK:
            yield from self._local_policies()

    def _set(self, name: str) -> ast.Set | None:
        """Return a set or map of kube-proxy's of which all elements of the text are known."""
        found = self._table.sets.get(name)
        if found is None or found.unsupported or () in found.elements or len(found.key) != _KEY_PARTS[name]:
            return None
        return found

    def _lost_cluster_ip(self) -> str:
        """Return a cluster IP that no map has, or that the set of cluster IPs lacks."""
        held, services, empty = map(self._set, (CLUSTER_IPS, SERVICE_IPS, _NO_ENDPOINTS))
        if held is None or services is None or empty is None:
            return ""
        known = {key[0] for each in (services, empty) for key in each.elements}
        lost = next((key[0] for key in held.elements if key[0] not in known), None)
        if lost is not None:
            return f"the maps of table {self._table.name} lack the cluster IP {lost}"
        of_clusters = (key[0] for key, chain in _calls(services) if chain.startswith(SERVICE_PORT_CHAINS))
        lost = next((address for address in of_clusters if (address,) not in held.elements), None)
        return f"the set {CLUSTER_IPS} of table {self._table.name} lacks {lost}" if lost is not None else ""

    def _lost_service_port(self) -> str:
        """Return a Service port whose cluster IP no map has, though there are chains or other elements of it."""
        services, empty = self._set(SERVICE_IPS), self._set(_NO_ENDPOINTS)
        if services is None or empty is None:
            return ""
        reached = {_port_of(chain) for _, chain in _calls(services) if chain.startswith(SERVICE_PORT_CHAINS)}
        refused = set(map(_same_name, empty.comments.values()))
        # kube-proxy empties a chain before it deletes it.
        written = (_port_of(name) for name in self._names if self._table.chains[name].rules and "__" not in name)
        unreached = (_named(port) for port in written if port not in reached)
        lost = next((name for name in unreached if name not in refused), "")
        node_ports = self._set(_NO_NODE_PORTS)
        if not lost and node_ports is not None:
            served = {_named(port) for port in reached}
            lost = next(
                (name for name in map(_same_name, node_ports.comments.values()) if name not in refused | served), ""
            )
        return f"the maps of table {self._table.name} lack the cluster IP of {lost}" if lost else ""

    @cached_property
    def _lost_frontends(self) -> list[tuple[str, ast.ElementKey]]:
        """The keys that only one of two maps has, each with the map that lacks it.

        kube-proxy has an address with source ranges in both maps of Service ports. Where a Service with policy Local has no
        endpoint on the node, it drops what is from outside, and it sends the node's own packets on. At a cluster IP it only drops.
        """
        services, empty, ranges, clusters = map(self._set, (SERVICE_IPS, _NO_ENDPOINTS, _FIREWALL, CLUSTER_IPS))
        lost: list[tuple[str, ast.ElementKey]] = []
        if services is not None and empty is not None:
            known = services.elements.keys() | empty.elements.keys()
            lost += ((SERVICE_IPS, key) for key in (ranges.elements if ranges is not None else ()) if key not in known)
            outside = (key for key in _drops(empty) if clusters is not None and key[:1] not in clusters.elements)
            lost += ((SERVICE_IPS, key) for key in outside if key not in services.elements)
        ports, refused = self._set(_NODE_PORTS), self._set(_NO_NODE_PORTS)
        if ports is not None and refused is not None:
            lost += ((_NODE_PORTS, key) for key in _drops(refused) if key not in ports.elements)
        return lost

    def _lost_dispatch(self) -> Iterator[ast.Rule]:
        """Yield a gap for each key that a map lacks."""
        for name, key in self._lost_frontends:
            *address, protocol, port = key
            to = ast.Compare(ast.Field.DADDR, tuple(address)) if address else ast.IsLocal(ast.Field.DADDR)
            ports = ast.Compare(ast.Field.L4PROTO, (protocol,)), ast.Compare(ast.Field.DPORT, (port,))
            yield ast.Rule((to, *ports, ast.RuleGap(f"{self._lacks(name, key)}: {MISSING}")))

    def _lacks(self, name: str, key: ast.ElementKey) -> str:
        return f"the map {name} of table {self._table.name} lacks {' . '.join(map(str, key))}"

    @cached_property
    def _endpoints(self) -> set[_Endpoint]:
        """The endpoints of all chains that are named as kube-proxy names those of a Service port."""
        named = ((name, _port_of(name).split("/")) for name in self._names)
        return {
            _Endpoint(each.address, each.port or 0, words[2], name.startswith("local-"))
            for name, words in named
            if len(words) == 4
            for each in rewrites(self._table.chains[name])
        }

    def _hairpins(self) -> Iterator[ast.Rule]:
        """Yield what a packet that an endpoint sends to itself assumes if the set of such connections lacks the endpoint.

        kube-proxy adds the endpoints of the node. An address in the set, and an endpoint of policy Local, is one of them.
        """
        held = self._set(HAIRPINS)
        if held is None:
            return
        here = {key[0] for key in held.elements} | {each.address for each in self._endpoints if each.local}
        for address, port, protocol, _ in sorted(self._endpoints):
            if (address, address, protocol, port) in held.elements:
                continue
            text = f"the set {HAIRPINS} of table {self._table.name} does not have {address}:{port}"
            gap = ast.Assumed(f"{text}, and {address} is assumed not to be a pod of this node")
            yield ast.Rule(
                (
                    ast.MarkIs(0, MASQUERADE_BIT),
                    ast.CtStatus(("dnat",)),
                    ast.Compare(ast.Field.SADDR, (address,)),
                    ast.Compare(ast.Field.DADDR, (address,)),
                    ast.Compare(ast.Field.L4PROTO, (protocol,)),
                    ast.Compare(ast.Field.DPORT, (port,)),
                    ast.RuleGap(f"{text}, an endpoint of this node: {MISSING}") if address in here else gap,
                )
            )

    def _local_policies(self) -> Iterator[ast.Rule]:
        """Yield what a packet assumes that is rejected at the cluster IP of a Service with policy Local.

        Another port of the Service may have no endpoint on the node: kube-proxy then drops packets instead of rejecting them.
        """
        services, empty = self._set(SERVICE_IPS), self._set(_NO_ENDPOINTS)
        if services is None or empty is None:
            return
        local = {key[0] for key, chain in _calls(services) if chain.startswith("local-")}
        local |= {key[0] for key in _drops(empty)}
        for address in sorted(map(str, local)):
            text = f"no element for another port of {address} is missing from table {self._table.name}"
            yield ast.Rule((ast.Compare(ast.Field.DADDR, (address,)), ast.Assumed(text)))


def _calls(verdicts: ast.Set) -> Iterator[tuple[ast.ElementKey, str]]:
    """Yield the keys of a verdict map that call a chain, each with the chain."""
    for key, verdict in verdicts.elements.items():
        if isinstance(verdict, (ast.Goto, ast.Jump)):
            yield key, verdict.chain


def _drops(verdicts: ast.Set) -> Iterator[ast.ElementKey]:
    """Yield the keys of a verdict map that drop packets."""
    return (key for key, verdict in verdicts.elements.items() if isinstance(verdict, ast.DropPacket))


def _port_of(chain: str) -> str:
    """Return the Service port of a chain as kube-proxy writes it: NAMESPACE/NAME/PROTOCOL/PORT."""
    return chain.split("-", 2)[-1].partition("__")[0]


def _named(port: str) -> str:
    """Return a Service port as NAMESPACE/NAME:PORT; an unnamed port has no colon."""
    service, _, last = port.rpartition("/")
    return _same_name(f"{service.rpartition('/')[0]}:{last}")


def _same_name(comment: str) -> str:
    return comment.removesuffix(":")


def rewrites(chain: ast.Chain) -> Iterator[ast.Dnat]:
    """Yield the destinations that the rules of a chain may set."""
    for rule in chain.rules:
        for each in rule.expressions:
            if isinstance(each, ast.Dnat):
                yield each
            elif isinstance(each, ast.RandomMap):
                yield from (action for *_, action in each.arms if isinstance(action, ast.Dnat))
