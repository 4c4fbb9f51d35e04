"""The structure that kube-proxy's rules always have.

It is that of kube-proxy 1.18 to 1.36 (pkg/proxy/iptables and pkg/proxy/nftables, `iptablesJumpChains`, `nftablesBaseChains`,
`nftablesJumpChains`).
"""

from __future__ import annotations

from typing import NamedTuple

from narthex.netfilter import ast

KUBE_PROXY_TABLE = "kube-proxy"
NARTHEX = "narthex"
"""Narthex's own tables in mode nftables."""
SERVICE_IPS = "service-ips"
CLUSTER_IPS = "cluster-ips"
CLUSTER_IPS_CHECK = "cluster-ips-check"
"""The chain that rejects what is for a cluster IP and that nothing else has taken."""
SERVICE_CHAINS = ("KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-FW-")
"""Prefixes of the chains that belong to one Service or one endpoint."""
SERVICE_PORT_CHAINS = ("service-", "local-")
"""Prefixes of the nft chains that packets for a cluster IP go to."""
HAIRPINS = "hairpin-connections"
"""The nft set of the node's endpoints, of which each is masqueraded if it meets itself."""
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
"""The chain that refuses what is for an external address of a Service without endpoints. It drops only if others have some."""
_NFT_SERVICE_CHAINS = ("service-", "local-", "endpoint-", "external-", "firewall-")
CHECK_MAPS = ("no-endpoint-services", "no-endpoint-nodeports", "firewall-ips", "service-nodeports")
"""Maps in which most packets find no element."""
DISPATCH = ("KUBE-SERVICES", "KUBE-NODEPORTS", "services")
MASQUERADE_BIT = 0x4000
_DROP_BIT = 0x8000


class StandardJump(NamedTuple):
    """A jump that kube-proxy writes into a base chain."""

    hook: str
    target: str
    new: bool = False
    """Only for new connections."""
    since: bool = False
    """Later versions have it, while earlier ones have the same jump in other chains alone."""
    unless: str = ""
    """A chain of mode ipvs, which does not have the jump."""


XTABLES_JUMPS: dict[str, tuple[StandardJump, ...]] = {
    "nat": (
        StandardJump("PREROUTING", "KUBE-SERVICES"),
        StandardJump("OUTPUT", "KUBE-SERVICES"),
        StandardJump("POSTROUTING", "KUBE-POSTROUTING"),
    ),
    "filter": (
        StandardJump("INPUT", "KUBE-PROXY-FIREWALL", new=True),
        StandardJump("INPUT", "KUBE-NODEPORTS"),
        StandardJump("INPUT", "KUBE-EXTERNAL-SERVICES", new=True),
        StandardJump("INPUT", "KUBE-FIREWALL"),
        StandardJump("FORWARD", "KUBE-PROXY-FIREWALL", new=True, unless="KUBE-NODE-PORT"),
        StandardJump("FORWARD", "KUBE-FORWARD"),
        StandardJump("FORWARD", "KUBE-SERVICES", new=True),
        StandardJump("FORWARD", "KUBE-EXTERNAL-SERVICES", new=True, since=True),
        StandardJump("OUTPUT", "KUBE-PROXY-FIREWALL", new=True, unless="KUBE-NODE-PORT"),
        StandardJump("OUTPUT", "KUBE-SERVICES", new=True),
        StandardJump("OUTPUT", "KUBE-FIREWALL"),
    ),
}
NFT_JUMPS = (
    StandardJump("prerouting", "firewall-check", new=True),
    StandardJump("output", "firewall-check", new=True),
    StandardJump("prerouting", "services"),
    StandardJump("output", "services"),
    StandardJump("postrouting", "masquerading"),
    StandardJump("input", "nodeport-endpoints-check", new=True),
    StandardJump("input", "service-endpoints-check", new=True),
    StandardJump("forward", "service-endpoints-check", new=True),
    StandardJump("output", "service-endpoints-check", new=True),
    StandardJump("forward", "cluster-ips-check", new=True),
    StandardJump("output", "cluster-ips-check", new=True),
)
NFT_NAT = ("services", "masquerading")
"""Targets that only base chains of type nat call."""
NFT_PRIORITIES = {"firewall-check": "dstnat - 10", "services": "dstnat", "masquerading": "srcnat"}

NEW = ast.CtState(("new",))
_FRONTEND: ast.Key = (ast.Field.DADDR, ast.Field.L4PROTO, ast.Field.DPORT)
_HAIRPIN: ast.Key = (ast.Field.SADDR, *_FRONTEND)
_PORT: ast.Key = (ast.Field.L4PROTO, ast.Field.DPORT)
_MARKED = ast.MarkIs(MASQUERADE_BIT, MASQUERADE_BIT)
XTABLES_CHAINS: dict[str, tuple[tuple[ast.Expression, ...], ...]] = {
    "KUBE-MARK-MASQ": ((ast.MarkOr(MASQUERADE_BIT),),),
    "KUBE-MARK-DROP": ((ast.MarkOr(_DROP_BIT),),),
    "KUBE-POSTROUTING": ((_MARKED, ast.MarkXor(MASQUERADE_BIT), ast.Masquerade()),),
}
"""Chains whose content is the same on every node."""
NFT_CHAINS: dict[str, tuple[tuple[ast.Expression, ...], ...]] = {
    "mark-for-masquerade": ((ast.MarkOr(MASQUERADE_BIT),),),
    "masquerading": (
        (_MARKED, ast.MarkXor(MASQUERADE_BIT), ast.Masquerade()),
        (ast.CtStatus(("dnat",)), ast.InSet(_HAIRPIN, HAIRPINS), ast.Masquerade()),
    ),
    "reject-chain": ((ast.RejectPacket(),),),
    "firewall-check": ((ast.VerdictMap(_FRONTEND, "firewall-ips"),),),
    "service-endpoints-check": ((ast.VerdictMap(_FRONTEND, "no-endpoint-services"),),),
    "nodeport-endpoints-check": ((ast.IsLocal(ast.Field.DADDR), ast.VerdictMap(_PORT, "no-endpoint-nodeports")),),
    "services": (
        (ast.VerdictMap(_FRONTEND, SERVICE_IPS),),
        (ast.IsLocal(ast.Field.DADDR), ast.VerdictMap(_PORT, "service-nodeports")),
    ),
}


def is_dispatch(chain: str) -> bool:
    """Return True for a chain of kube-proxy that decides where a packet goes, so that nothing can be said without it."""
    return chain in DISPATCH or chain.startswith(SERVICE_CHAINS) or "/" in chain


def is_service_chain(chain: str) -> bool:
    """Return True for a chain that belongs to one Service or one endpoint."""
    return chain.startswith(SERVICE_CHAINS) or ("/" in chain and chain.startswith(_NFT_SERVICE_CHAINS))


def is_proxy_chain(table: str, chain: str) -> bool:
    """Return True for a chain of kube-proxy, which refuses packets only if no other rule of it rewrites them."""
    return table == KUBE_PROXY_TABLE or chain.startswith("KUBE-")
