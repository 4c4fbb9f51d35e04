"""What every chain depends on in addition to its Service: pod detection, node ports, the mark, and the fixed chains."""

from __future__ import annotations

from functools import cached_property
from ipaddress import IPv4Network, IPv6Network

import msgspec

from narthex.model import IPFamily, collapse, is_zero_prefix, parsed_network
from narthex.netfilter.ast import (
    Accept,
    Compare,
    CtState,
    CtStatus,
    DropPacket,
    Expression,
    Field,
    IsLocal,
    Jump,
    MarkIs,
    MarkOr,
    MarkXor,
    Masquerade,
    Return,
    Rule,
)
from narthex.netfilter.xtables.values import plain_network
from narthex.proxy.backends.iptables import names
from narthex.proxy.plan.ir import NodePorts, Plan, PodDetector

Rules = tuple[Rule, ...]
Match = tuple[Expression, ...]

NEW = CtState(("new",))
SENT_ON = CtStatus(("dnat",))
TO_SELF = IsLocal(Field.DADDR)
FROM_SELF = IsLocal(Field.SADDR)
JUMP_MARK = Jump(names.MARK_MASQ)

ROUTE_LOCALNET = ("net/ipv4/conf/all/route_localnet", "1")
"""Lets 127.0.0.0/8 be the source of packets that leave this node (row 9.9)."""

_RANK = {Field.SADDR: 0, Field.DADDR: 1, Field.IIFNAME: 2, Field.OIFNAME: 3, Field.L4PROTO: 4}
_BEHIND = 5


def _rank(expression: Expression) -> int:
    return _RANK.get(expression.field, _BEHIND) if type(expression) is Compare else _BEHIND


def rule(*expressions: Expression, comment: str = "") -> Rule:
    """Return a rule with its matches in the order in which the kernel's tool prints them."""
    return Rule(tuple(sorted(expressions, key=_rank)), comment)


def address_match(field: Field, network: str, negate: bool = False) -> Match:
    """Return a match of source or destination; empty if the network contains everything."""
    if is_zero_prefix(network) and not negate:
        return ()
    return (Compare(field, (plain_network(network),), negate),)


class Frame(msgspec.Struct, frozen=True, dict=True):
    """The common part of one plan. If two frames are equal, the chains of an unchanged Service are equal."""

    family: IPFamily
    detector: PodDetector
    node_ports: NodePorts
    mark: int
    drop_invalid: bool
    """Not where the kernel is liberal about windows (row 19.7)."""
    commented: bool
    """Endpoint rules carry comments; not in large clusters (row 21.12)."""

    @classmethod
    def of(cls, plan: Plan, commented: bool) -> Frame:
        """Return the frame of a plan."""
        return cls(plan.family, plan.pods, plan.node_ports, plan.masquerade_mark, plan.drop_invalid, commented)

    @cached_property
    def everyone_is_pod(self) -> bool:
        """True if the network of the pods contains all addresses."""
        return any(is_zero_prefix(cidr) for cidr in self.detector.cidrs)

    @cached_property
    def pods(self) -> tuple[Match, ...]:
        """Matches of which one applies to each packet of a pod."""
        pods = self.detector
        if pods.cidrs:
            return tuple(address_match(Field.SADDR, cidr) for cidr in pods.cidrs)
        interface = pods.interface or (pods.interface_prefix and pods.interface_prefix + "*")
        return ((Compare(Field.IIFNAME, (interface,)),),) if interface else ()

    def mark_strangers(self, *match: Expression, comment: str) -> Rules:
        """Return rules that mark every matching packet that is not from a pod."""
        if len(self.pods) > 1:
            return (rule(*match, Jump(names.MARK_STRANGERS), comment=comment),)
        ((pod,),) = self.pods
        assert isinstance(pod, Compare)
        return (rule(Compare(pod.field, pod.values, True), *match, JUMP_MARK, comment=comment),)

    @cached_property
    def node_port_matches(self) -> tuple[Match, ...]:
        """Matches of which one applies to each destination where node ports answer (rows 9.1 to 9.10)."""
        cidrs = self.node_ports.cidrs
        loopback = () if self.node_ports.localhost and self.family is IPFamily.IPV4 else (self.family.loopback,)
        if cidrs is None or any(is_zero_prefix(cidr) for cidr in cidrs):
            return ((*(match for cidr in loopback for match in address_match(Field.DADDR, cidr, True)), TO_SELF),)
        nets = _without(collapse(cidrs), loopback)
        return tuple((*address_match(Field.DADDR, net), TO_SELF) for net in nets)

    def jumps_to_node_ports(self, chain: str) -> Rules:
        """Return the jumps to a chain of node ports, which end the chain of exact addresses."""
        text = "kubernetes service nodeports; NOTE: this must be the last rule in this chain"
        return tuple(rule(*match, Jump(chain), comment=text) for match in self.node_port_matches)

    def fixed_nat(self) -> dict[str, Rules]:
        """Return the chains of the nat table that do not depend on Services."""
        bits = self.mark
        chains: dict[str, Rules] = {
            names.POSTROUTING: (
                rule(MarkIs(bits, bits, negate=True), Return()),
                rule(MarkXor(bits)),
                rule(Masquerade(), comment="kubernetes service traffic requiring SNAT"),
            ),
            names.MARK_MASQ: (rule(MarkOr(bits)),),
            names.CANARY: (),
        }
        if len(self.pods) > 1:
            chains[names.MARK_STRANGERS] = (*(rule(*pod, Return()) for pod in self.pods), rule(JUMP_MARK))
        return chains

    def fixed_filter(self) -> dict[str, Rules]:
        """Return the chains of the filter table that do not depend on Services."""
        invalid = (rule(CtState(("invalid",)), DropPacket()),) if self.drop_invalid else ()
        chains: dict[str, Rules] = {names.FORWARD: (*invalid, *self.accept_forwarded()), names.CANARY: ()}
        if self.guarded:
            chains[names.FIREWALL] = (guard_rule(),)
        return chains

    def accept_forwarded(self) -> Rules:
        """Return the rules that accept what is forwarded to endpoints, whatever firewall follows."""
        words = "kubernetes forwarding"
        return (
            rule(MarkIs(self.mark, self.mark), Accept(), comment=f"{words} rules"),
            rule(CtState(("related", "established")), Accept(), comment=f"{words} conntrack rule"),
        )

    @cached_property
    def guarded(self) -> bool:
        """True if route_localnet is needed for node ports on 127.0.0.1, and therefore its guard (row 9.11)."""
        return self.node_ports.localhost and self.family is IPFamily.IPV4

    def jumps(self) -> dict[tuple[str, str], Rules]:
        """Return our rules in built-in chains, in the order of kube-proxy's (rows 22.2, 22.3).

        There is one more than in kube-proxy: OUTPUT to EXTERNAL-SERVICES, so that a process on this node is refused
        like any other client by a load balancer address or external IP without endpoints (rows 13.4, 29.5).
        """
        firewall = rule(NEW, Jump(names.PROXY_FIREWALL), comment="kubernetes load balancer firewall")
        external = "kubernetes externally-visible service portals"
        external_services = rule(NEW, Jump(names.EXTERNAL_SERVICES), comment=external)
        services = rule(NEW, Jump(names.SERVICES), comment="kubernetes service portals")
        node_ports = rule(Jump(names.NODE_PORTS), comment="kubernetes health check service ports")
        forward = rule(Jump(names.FORWARD), comment="kubernetes forwarding rules")
        guard = (rule(Jump(names.FIREWALL)),) if self.guarded else ()
        return {
            **nat_jumps(),
            ("filter", "INPUT"): (firewall, node_ports, external_services, *guard),
            ("filter", "FORWARD"): (firewall, forward, services, external_services),
            ("filter", "OUTPUT"): (firewall, services, external_services, *guard),
        }

    def sysctls(self) -> tuple[tuple[str, str], ...]:
        """Return the kernel settings that the rules rely on."""
        return (ROUTE_LOCALNET,) if self.guarded else ()


def nat_jumps() -> dict[tuple[str, str], Rules]:
    """Return the jumps of the table nat."""
    portals = (rule(Jump(names.SERVICES), comment="kubernetes service portals"),)
    postrouting = (rule(Jump(names.POSTROUTING), comment="kubernetes postrouting rules"),)
    return {("nat", "PREROUTING"): portals, ("nat", "OUTPUT"): portals, ("nat", "POSTROUTING"): postrouting}


def guard_rule() -> Rule:
    """Return kubelet's rule against packets from other hosts to 127.0.0.0/8."""
    return rule(
        *address_match(Field.SADDR, "127.0.0.0/8", negate=True),
        *address_match(Field.DADDR, "127.0.0.0/8"),
        CtState(("related", "established"), negate=True),
        CtStatus(("dnat",), negate=True),
        DropPacket(),
        comment="block incoming localnet connections",
    )


def _without(cidrs: tuple[str, ...], holes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the networks without the parts that are in the holes."""
    nets: list[IPv4Network | IPv6Network] = [parsed_network(cidr) for cidr in cidrs]
    for hole in map(parsed_network, holes):
        kept: list[IPv4Network | IPv6Network] = []
        for net in nets:
            if hole.supernet_of(net):  # type: ignore[arg-type]
                continue
            kept += net.address_exclude(hole) if net.supernet_of(hole) else (net,)  # type: ignore[arg-type]
        nets = sorted(kept)
    return tuple(map(str, nets))
