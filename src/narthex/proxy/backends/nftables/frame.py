"""The constant part of table `narthex`: base chains, the chains that they call, and all shared sets, still empty.

Nothing here depends on a Service. The frame depends on `NftSettings` only. Layout (rows 23.3 to 23.5):

    firewall-prerouting, firewall-output   before DNAT: source ranges (rows 10.3, 10.14)
    nat-prerouting, nat-output             frontend to chain that forwards; an exact address precedes node ports
    nat-postrouting                        masquerade marked packets and hairpin connections
    filter-input, -forward, -output        what was not forwarded: refuse it at frontends, guard ClusterIPs

All filter chains match only connections without DNAT. The address and port of an endpoint may equal another frontend,
and a connection that was forwarded to it must not be judged twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from narthex.model import IPFamily, collapse, family_of
from narthex.netfilter.ast import (
    Chain,
    Compare,
    CtState,
    CtStatus,
    DropPacket,
    ElementKey,
    Expression,
    Field,
    Goto,
    Hook,
    InSet,
    IsLocal,
    Jump,
    Key,
    MarkIs,
    MarkXor,
    Masquerade,
    RejectPacket,
    Rule,
    Set,
    Slot,
    TcpReset,
    VerdictMap,
)
from narthex.proxy.plan.ir import Plan, PodDetector

TABLE = "narthex"
REJECT_CHAIN = "reject-chain"

ADDRESS_KEY: Key = (Field.DADDR, Field.L4PROTO, Field.DPORT)
"""Key of frontends with an address."""
PORT_KEY: Key = (Field.L4PROTO, Field.DPORT)
"""Key of node ports."""
ANY_SLOT = Slot(4294967295)
"""Type of the slot number in the key of a map. The rule that selects an endpoint states the limit."""

SERVICES, NODEPORT_SERVICES = "services", "nodeport-services"
ENDPOINTS, ENDPOINTS_LOCAL = "endpoints", "endpoints-local"
NODEPORT_ENDPOINTS, NODEPORT_ENDPOINTS_LOCAL = "nodeport-endpoints", "nodeport-endpoints-local"
NO_ENDPOINT_SERVICES, NO_ENDPOINT_NODEPORTS = "no-endpoint-services", "no-endpoint-nodeports"
RESTRICTED, ALLOWED_SOURCES = "restricted", "allowed-sources"
NODEPORT_RESTRICTED, NODEPORT_ALLOWED_SOURCES = "nodeport-restricted", "nodeport-allowed-sources"
CLUSTER_IPS, HAIRPIN = "cluster-ips", "hairpin"
POD_CIDRS, SERVICE_CIDRS, NODEPORT_ADDRESSES = "pod-cidrs", "service-cidrs", "nodeport-addresses"

_NEW = CtState(("new",))
_NOT_SENT = CtStatus(("dnat",), negate=True)


class NftSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a plan that the constant part depends on."""

    family: IPFamily
    pods: PodDetector
    node_port_cidrs: tuple[str, ...] | None
    service_cidrs: tuple[str, ...]
    mark: int
    drop_invalid: bool = True

    @classmethod
    def of(cls, plan: Plan) -> NftSettings:
        """Return the settings of a plan.

        `node_ports.localhost` has no effect: rules of mode nftables never answer on loopback (rows 9.9, 9.13).
        """
        cidrs = plan.node_ports.cidrs
        return cls(
            family=plan.family,
            pods=plan.pods,
            node_port_cidrs=None if cidrs is None else collapse(cidrs),
            service_cidrs=collapse(plan.service_cidrs),
            mark=plan.masquerade_mark,
            drop_invalid=plan.drop_invalid,
        )


@lru_cache(maxsize=8)
def shared_sets(settings: NftSettings) -> Mapping[str, Set]:
    """Return the declarations of all sets and maps that Services share. Sets of settings include their elements."""
    sets = [
        _verdicts(SERVICES, ADDRESS_KEY, counter=True),
        _verdicts(NODEPORT_SERVICES, PORT_KEY, counter=True),
        _endpoints(ENDPOINTS, ADDRESS_KEY),
        _endpoints(ENDPOINTS_LOCAL, ADDRESS_KEY),
        _endpoints(NODEPORT_ENDPOINTS, PORT_KEY),
        _endpoints(NODEPORT_ENDPOINTS_LOCAL, PORT_KEY),
        _verdicts(NO_ENDPOINT_SERVICES, ADDRESS_KEY),
        _verdicts(NO_ENDPOINT_NODEPORTS, PORT_KEY),
        Set(name=RESTRICTED, key=ADDRESS_KEY),
        Set(name=ALLOWED_SOURCES, key=(*ADDRESS_KEY, Field.SADDR), interval=True),
        Set(name=NODEPORT_RESTRICTED, key=PORT_KEY),
        Set(name=NODEPORT_ALLOWED_SOURCES, key=(*PORT_KEY, Field.SADDR), interval=True),
        Set(name=CLUSTER_IPS, key=(Field.DADDR,)),
        Set(name=HAIRPIN, key=(Field.SADDR, Field.DADDR)),
        _networks(POD_CIDRS, Field.SADDR, collapse(settings.pods.cidrs)),
        _networks(SERVICE_CIDRS, Field.DADDR, settings.service_cidrs),
        _networks(NODEPORT_ADDRESSES, Field.DADDR, settings.node_port_cidrs or ()),
    ]
    return {one.name: one for one in sets}


def element_network(cidr: str) -> str:
    """Return a network as an element holds it: a single address without prefix length, as nft lists it."""
    address, _, length = cidr.partition("/")
    return address if length and int(length) == family_of(address).host_bits else cidr


def _verdicts(name: str, key: Key, counter: bool = False) -> Set:
    return Set(name=name, key=key, data="verdict", counter=counter)


def _endpoints(name: str, key: Key) -> Set:
    return Set(name=name, key=(*key, ANY_SLOT), data="endpoint", counter=True)


def _networks(name: str, field: Field, cidrs: tuple[str, ...]) -> Set:
    elements: dict[ElementKey, None] = {(element_network(cidr),): None for cidr in cidrs}
    return Set(name=name, key=(field,), interval=True, elements=elements)


def frame_chains(settings: NftSettings) -> dict[str, Chain]:
    """Return all chains that do not depend on Services."""
    chains = [*_base_chains(settings), *_nat_chains(settings), *_filter_chains(settings)]
    return {chain.name: chain for chain in chains}


def _base_chains(settings: NftSettings) -> list[Chain]:
    check_firewall = Rule((_NEW, _NOT_SENT, Jump("firewall-check")))
    send = Rule((Jump("services"),))
    refuse = Rule((_NEW, _NOT_SENT, Jump("service-endpoints-check")))
    guard = Rule((_NEW, _NOT_SENT, Jump("cluster-ips-check")))
    # An endpoint's packet that is out of window is not translated back, so its client, or this node for those whom it
    # masquerades, takes it for a stranger's and resets the endpoint's connection (row 30.9). The packet does no harm, its
    # answer does. To drop only this one leaves alone who sees but one direction of a connection (unlike row 19.7).
    stray = (Rule((CtState(("invalid",)), TcpReset(), DropPacket())),) if settings.drop_invalid else ()
    marked = MarkIs(settings.mark, settings.mark)
    postrouting = (
        Rule((marked, Goto("masquerading"))),
        # Without the look at the connection a process on this node that talks to its own address would be rewritten.
        Rule((CtStatus(("dnat",)), InSet((Field.SADDR, Field.DADDR), HAIRPIN), Masquerade())),
    )
    return [
        _base("firewall-prerouting", "filter", "prerouting", -110, check_firewall),
        _base("firewall-output", "filter", "output", -110, check_firewall),
        _base("nat-prerouting", "nat", "prerouting", -100, send),
        _base("nat-output", "nat", "output", -100, send),
        _base("nat-postrouting", "nat", "postrouting", 100, *postrouting),
        _base("filter-input", "filter", "input", 0, refuse),
        _base("filter-forward", "filter", "forward", 0, *stray, refuse, guard),
        _base("filter-output", "filter", "output", 0, *stray, refuse, guard),
    ]


def _base(name: str, kind: str, hook: str, priority: int, *rules: Rule) -> Chain:
    return Chain(name=name, hook=Hook(type=kind, hook=hook, priority=priority), rules=rules)


def _nat_chains(settings: NftSettings) -> list[Chain]:
    allowed: Key = (*PORT_KEY, Field.SADDR)
    # Ranges of node ports are checked here, behind the look-up of exact addresses, which win.
    node_ports = (
        Rule((InSet(PORT_KEY, NODEPORT_RESTRICTED), InSet(allowed, NODEPORT_ALLOWED_SOURCES, True), DropPacket())),
        Rule((VerdictMap(PORT_KEY, NODEPORT_SERVICES),)),
    )
    services = (Rule((VerdictMap(ADDRESS_KEY, SERVICES),)), *_at_node_address(settings, Jump("nodeports")))
    return [
        Chain(name="services", rules=services),
        Chain(name="nodeports", rules=node_ports),
        Chain(name="masquerading", rules=(Rule((MarkXor(settings.mark),)), Rule((Masquerade(),)))),
    ]


def _filter_chains(settings: NftSettings) -> list[Chain]:
    allowed: Key = (*ADDRESS_KEY, Field.SADDR)
    firewall = Rule((InSet(ADDRESS_KEY, RESTRICTED), InSet(allowed, ALLOWED_SOURCES, True), DropPacket()))
    refuse = (
        Rule((VerdictMap(ADDRESS_KEY, NO_ENDPOINT_SERVICES),)),
        *_at_node_address(settings, VerdictMap(PORT_KEY, NO_ENDPOINT_NODEPORTS)),
    )
    guard = (
        Rule((InSet((Field.DADDR,), CLUSTER_IPS), RejectPacket())),
        Rule((InSet((Field.DADDR,), SERVICE_CIDRS), DropPacket())),
    )
    return [
        Chain(name="firewall-check", rules=(firewall,)),
        Chain(name="service-endpoints-check", rules=refuse),
        Chain(name="cluster-ips-check", rules=guard),
        Chain(name=REJECT_CHAIN, rules=(Rule((RejectPacket(),)),)),
    ]


def _at_node_address(settings: NftSettings, then: Expression) -> tuple[Rule, ...]:
    """Return a rule with `then` for packets to addresses on which node ports answer (rows 9.1, 9.2, 9.8 to 9.10)."""
    cidrs = settings.node_port_cidrs
    if cidrs == ():
        return ()
    loopback = element_network(settings.family.loopback)
    conditions: tuple[Expression, ...] = (Compare(Field.DADDR, (loopback,), negate=True), IsLocal(Field.DADDR))
    if cidrs is not None:
        conditions = (*conditions, InSet((Field.DADDR,), NODEPORT_ADDRESSES))
    return (Rule((*conditions, then)),)


def by_sender(settings: NftSettings, pod: Expression, node: Expression, other: Expression) -> tuple[Rule, ...]:
    """Return rules that end with one of three verdicts, by the class of the sender; the first match counts.

    Classes with the same verdict share a rule where possible.
    """
    if not settings.pods.enabled:
        pod = node
    if pod == node == other:
        return (Rule((other,)),)
    rules = [Rule((_from_pod(settings.pods), pod))] if settings.pods.enabled else []
    if node != other:
        rules.append(Rule((IsLocal(Field.SADDR), node)))
    return (*rules, Rule((other,)))


def _from_pod(pods: PodDetector) -> Expression:
    if pods.cidrs:
        return InSet((Field.SADDR,), POD_CIDRS)
    return Compare(Field.IIFNAME, (pods.interface or f"{pods.interface_prefix}*",))
