"""The fixed iptables part of mode ipvs: sets decide on masquerading and refusals.

The rules name sets, not Services, so they change with the configuration only, and when a set gets its first entry or
loses its last: as in kube-proxy, an empty set has no rule. IPVS is in INPUT after the filter table, and in OUTPUT
between the tables mangle and filter. Packets from this node are therefore judged in mangle, where kube-proxy has a rule
for each restricted address in filter.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from immutables import Map

from narthex.model import is_zero_prefix
from narthex.netfilter.ast import (
    Accept,
    Compare,
    DropPacket,
    Expression,
    Field,
    IpvsMatch,
    IsLocal,
    Jump,
    Masquerade,
    MatchSet,
    RejectPacket,
    Return,
    Rule,
)
from narthex.proxy.backends.iptables.frame import (
    FROM_SELF,
    JUMP_MARK,
    NEW,
    TO_SELF,
    Frame,
    Match,
    Rules,
    address_match,
    nat_jumps,
    rule,
)
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.ipvs import names

Mask = tuple[bool, bool, bool]
"""True for pods, this node, and others if their packets are masqueraded."""

MASK_NONE: Mask = (False, False, False)
MASK_NON_PODS: Mask = (False, True, True)
MASK_ALL: Mask = (True, True, True)

_COMMENTS = {
    names.LOOP_BACK: "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose",
    names.CLUSTER_IP: "Kubernetes service cluster ip + port for masquerade purpose",
    names.EXTERNAL_IP: "Kubernetes service external ip + port for masquerade and filter purpose",
    names.EXTERNAL_IP_LOCAL: "Kubernetes service external ip + port with externalTrafficPolicy=local",
    names.LOAD_BALANCER_IP: "Kubernetes service lb portal",
    names.LOAD_BALANCER_IP_LOCAL: "Kubernetes service load balancer ip + port with externalTrafficPolicy=local",
    names.LOAD_BALANCER_IP_FW: "Kubernetes service load balancer ip + port for load balancer with sourceRange",
    names.LOAD_BALANCER_IP_SOURCE_IP: "Kubernetes service load balancer ip + port + source IP for packet filter purpose",
    names.LOAD_BALANCER_IP_SOURCE_CIDR: "Kubernetes service load balancer ip + port + source cidr for packet filter purpose",
    names.NODE_PORT_TCP: "Kubernetes nodeport TCP port for masquerade purpose",
    names.NODE_PORT_UDP: "Kubernetes nodeport UDP port for masquerade purpose",
    names.NODE_PORT_SCTP: "Kubernetes nodeport SCTP port for masquerade purpose with type 'hash ip:port'",
    names.NODE_PORT_LOCAL_TCP: "Kubernetes nodeport TCP port with externalTrafficPolicy=local",
    names.NODE_PORT_LOCAL_UDP: "Kubernetes nodeport UDP port with externalTrafficPolicy=local",
    names.NODE_PORT_LOCAL_SCTP: "Kubernetes nodeport SCTP port with externalTrafficPolicy=local with type 'hash ip:port'",
    names.HEALTH_CHECK: "Kubernetes health check node port",
    names.DROP_POD: "Kubernetes service ip + port without endpoint for pods by its traffic policy",
    names.DROP_NODE: "Kubernetes service ip + port without endpoint for this node by its traffic policy",
    names.DROP_OTHER: "Kubernetes service ip + port without endpoint for others by its traffic policy",
}
"""kube-proxy's comments, which people search their dumps for; the last three are Narthex's."""

_NODE_PORT_SETS = (
    ("tcp", names.NODE_PORT_LOCAL_TCP, names.NODE_PORT_TCP, ("dst",)),
    ("udp", names.NODE_PORT_LOCAL_UDP, names.NODE_PORT_UDP, ("dst",)),
    ("sctp", names.NODE_PORT_LOCAL_SCTP, names.NODE_PORT_SCTP, ("dst", "dst")),
)
_DESTINATION = ("dst", "dst")
_DROPS = (names.DROP_POD, names.DROP_NODE, names.DROP_OTHER)


class IpvsFrame(msgspec.Struct, frozen=True):
    """What the fixed rules depend on. If two frames are equal, the same sets give the same rules."""

    shared: Frame
    service_cidrs: tuple[str, ...]

    def tables(self, held: frozenset[str], mask: Mask) -> XtablesRules:
        """Return the rules for non-empty sets (by their IPv4 names) and the masquerading of ClusterIPs."""
        return _Writer(self, held, mask).tables()


class _Writer:
    def __init__(self, frame: IpvsFrame, held: frozenset[str], mask: Mask) -> None:
        self._family = frame.shared.family
        self._shared = frame.shared
        self._service_cidrs = frame.service_cidrs
        self._held = held
        self._mask = mask

    def tables(self) -> XtablesRules:
        """Return the shared chains of the nat, filter, and mangle tables with the jumps to them."""
        chains = {"nat": Map(self._nat()), "filter": Map(self._filter()), "mangle": Map(self._mangle())}
        return XtablesRules(self._family, chains, Map(self._jumps()))

    def _in(self, name: str, sides: tuple[str, ...] = _DESTINATION) -> MatchSet:
        return MatchSet(names.set_name(name, self._family), sides)

    def _if_in(self, name: str, *rest: Expression, sides: tuple[str, ...] = _DESTINATION, only: Match = ()) -> Rules:
        """Return a rule for entries of the set with the matches `only`; no rule if the set is empty."""
        if name not in self._held:
            return ()
        return (rule(*only, self._in(name, sides), *rest, comment=_COMMENTS[name]),)

    def _any(self, *sets: str) -> bool:
        return any(name in self._held for name in sets)

    def _nat(self) -> dict[str, Rules]:
        fixed = self._shared.fixed_nat()
        hairpin = self._if_in(names.LOOP_BACK, Masquerade(), sides=("dst", "dst", "src"))
        chains = {
            names.SERVICES: tuple(self._services()),
            names.LOAD_BALANCER: (
                *self._if_in(names.LOAD_BALANCER_IP_LOCAL, Jump(names.MARK_NODE)),
                *self._if_in(names.LOAD_BALANCER_IP_LOCAL, Return()),
                rule(JUMP_MARK),
            ),
            names.NODE_PORT: tuple(self._node_port()),
            names.POSTROUTING: (*hairpin, *fixed[names.POSTROUTING]),
            names.MARK_MASQ: fixed[names.MARK_MASQ],
            names.MARK_NODE: (*(rule(*pod, Return()) for pod in self._shared.pods), rule(FROM_SELF, JUMP_MARK)),
        }
        if names.MARK_STRANGERS in fixed:
            chains[names.MARK_STRANGERS] = fixed[names.MARK_STRANGERS]
        return chains

    def _services(self) -> Iterator[Rule]:
        """Yield rules in kube-proxy's order: load balancer IPs, ClusterIPs, external IPs, node ports."""
        yield from self._if_in(names.LOAD_BALANCER_IP, Jump(names.LOAD_BALANCER))
        if names.CLUSTER_IP in self._held:
            yield from self._mark_cluster_ips()
        yield from self._if_in(names.EXTERNAL_IP, JUMP_MARK)
        yield from self._if_in(names.EXTERNAL_IP, Accept())
        yield from self._if_in(names.EXTERNAL_IP_LOCAL, Jump(names.MARK_NODE))
        yield from self._if_in(names.EXTERNAL_IP_LOCAL, Accept())
        for match in self._node_port_matches():
            yield rule(*match, Jump(names.NODE_PORT))
        for name in (names.CLUSTER_IP, names.LOAD_BALANCER_IP):
            if name in self._held:
                yield rule(self._in(name), Accept())

    def _mark_cluster_ips(self) -> Rules:
        held, comment = self._in(names.CLUSTER_IP), _COMMENTS[names.CLUSTER_IP]
        if self._mask == MASK_ALL:
            return (rule(held, JUMP_MARK, comment=comment),)
        if self._mask == MASK_NON_PODS:
            everyone = self._shared.everyone_is_pod
            return () if everyone else self._shared.mark_strangers(held, comment=comment)
        # A process on this node that connects to an address bound here has it as its source, too, and no answer
        # would find the way back (row 5.5).
        return (rule(self._in(names.CLUSTER_IP, ("src", "dst")), held, JUMP_MARK, comment=comment),)

    def _node_port_matches(self) -> tuple[Match, ...]:
        cidrs = self._shared.node_ports.cidrs
        if cidrs is None or any(map(is_zero_prefix, cidrs)):
            return ((TO_SELF,),)
        return tuple((*address_match(Field.DADDR, cidr), TO_SELF) for cidr in cidrs)

    def _node_port(self) -> Iterator[Rule]:
        """Yield rules of node ports. An exact address that is the node's own, or bound here, was decided before."""
        if not self._any(*(name for _, _, name, _ in _NODE_PORT_SETS)):
            return
        yield rule(*address_match(Field.DADDR, self._family.loopback), Return())
        for name in (names.CLUSTER_IP, names.LOAD_BALANCER_IP):
            if name in self._held:
                yield rule(self._in(name), Return())
        for protocol, local, every, sides in _NODE_PORT_SETS:
            asked = Compare(Field.L4PROTO, (protocol,))
            yield from self._if_in(local, asked, Jump(names.MARK_NODE), sides=sides)
            yield from self._if_in(local, asked, Return(), sides=sides)
            yield from self._if_in(every, asked, JUMP_MARK, sides=sides)

    def _filter(self) -> dict[str, Rules]:
        probes = Compare(Field.L4PROTO, ("tcp",)), Accept()
        return {
            names.FORWARD: self._shared.accept_forwarded(),
            names.NODE_PORT: self._if_in(names.HEALTH_CHECK, *probes, sides=("dst",)),
            names.PROXY_FIREWALL: tuple(self._firewall()),
            names.SOURCE_RANGES: self._source_ranges(),
            names.IPVS_FILTER: tuple(self._guard()),
            names.IPVS_OUT_FILTER: tuple(self._out_filter()),
        }

    def _mangle(self) -> dict[str, Rules]:
        """Return the rules for packets from this node, before IPVS takes them."""
        return {names.PROXY_FIREWALL: tuple(self._firewall()), names.SOURCE_RANGES: self._source_ranges()}

    def _firewall(self) -> Iterator[Rule]:
        """Yield source ranges, then drops where a Local policy leaves no endpoint (rows 10.3, 13.3).

        Packets that IPVS has forwarded pass again, in output and over loopback, and are not judged twice: an endpoint
        may have the address and port of another frontend, as host network pods do.
        """
        if self._any(names.LOAD_BALANCER_IP_FW, *_DROPS):
            yield rule(IpvsMatch(), Return())
        yield from self._if_in(names.LOAD_BALANCER_IP_FW, Jump(names.SOURCE_RANGES))
        if not self._any(*_DROPS):
            return
        for pod in self._shared.pods:
            yield from self._if_in(names.DROP_POD, DropPacket(), only=pod)
            yield rule(*pod, Return())
        yield from self._if_in(names.DROP_NODE, DropPacket(), only=(FROM_SELF,))
        if names.DROP_OTHER in self._held:
            yield rule(FROM_SELF, Return())
        yield from self._if_in(names.DROP_OTHER, DropPacket())

    def _source_ranges(self) -> Rules:
        sides = ("dst", "dst", "src")
        return (
            *self._if_in(names.LOAD_BALANCER_IP_SOURCE_CIDR, Return(), sides=sides),
            *self._if_in(names.LOAD_BALANCER_IP_SOURCE_IP, Return(), sides=sides),
            rule(DropPacket()),
        )

    def _guard(self) -> Iterator[Rule]:
        """Yield rules that keep the node's processes from answering at addresses of Services (row 24.3)."""
        for name in (names.LOAD_BALANCER_IP, names.CLUSTER_IP, names.EXTERNAL_IP, names.EXTERNAL_IP_LOCAL):
            if name in self._held:
                yield rule(self._in(name), Return())
        if names.HEALTH_CHECK in self._held:
            yield rule(Compare(Field.L4PROTO, ("tcp",)), self._in(names.HEALTH_CHECK, ("dst",)), Return())
        if names.IPVS_IPS in self._held:
            yield rule(self._in(names.IPVS_IPS, ("dst",)), RejectPacket())

    def _out_filter(self) -> Iterator[Rule]:
        """Yield drops for free addresses of ServiceCIDRs (row 5.9); an endpoint may have one."""
        if self._service_cidrs:
            yield rule(IpvsMatch(), Return())
        for cidr in self._service_cidrs:
            yield rule(*address_match(Field.DADDR, cidr), IsLocal(Field.DADDR, negate=True), DropPacket())

    def _jumps(self) -> dict[tuple[str, str], Rules]:
        firewall = rule(NEW, Jump(names.PROXY_FIREWALL), comment="kube-proxy firewall rules")
        access = "kubernetes ipvs access filter"
        out = rule(NEW, Jump(names.IPVS_OUT_FILTER), comment=access)
        return {
            **nat_jumps(),
            ("filter", "INPUT"): (
                rule(NEW, Jump(names.IPVS_FILTER), comment=access),
                firewall,
                rule(Jump(names.NODE_PORT), comment="kubernetes health check rules"),
            ),
            ("filter", "FORWARD"): (out, rule(Jump(names.FORWARD), comment="kubernetes forwarding rules")),
            ("filter", "OUTPUT"): (out,),
            ("mangle", "OUTPUT"): (firewall,),
        }
