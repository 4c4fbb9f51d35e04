"""Names of kube-proxy's chains, and which chains belong to mode iptables (rows 22.1 to 22.4)."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping
from typing import NamedTuple

from narthex.model import ServicePortName, join_port
from narthex.proxy.plan.ir import Endpoint

SERVICES = "KUBE-SERVICES"
NODE_PORTS = "KUBE-NODEPORTS"
POSTROUTING = "KUBE-POSTROUTING"
MARK_MASQ = "KUBE-MARK-MASQ"
MARK_STRANGERS = "KUBE-MARK-NONPOD"
"""Marks packets that are not from pods. Exists only if pods have more than one network, which a single negated match
cannot express. kube-proxy has no such chain, because it uses the first network only.
"""
EXTERNAL_SERVICES = "KUBE-EXTERNAL-SERVICES"
FORWARD = "KUBE-FORWARD"
PROXY_FIREWALL = "KUBE-PROXY-FIREWALL"
FIREWALL = "KUBE-FIREWALL"
"""The guard of route_localnet (row 9.11). kubelet has a chain of this name with the same rule."""
CANARY = "KUBE-PROXY-CANARY"
"""Empty; if it is missing, another program has flushed the table (row 21.8)."""

ENDPOINT_SETS = ("KUBE-SVC-", "KUBE-SVL-")
"""Prefixes of the chains that choose an endpoint of a Service port."""

KUBELET_CHAINS = ("KUBE-KUBELET-CANARY", "KUBE-IPTABLES-HINT")
"""In mangle: a kubelet maintains rules in this network namespace (row 22.9)."""

OWN_TABLES = ("nat", "filter", "mangle")


class ChainOwnership(NamedTuple):
    """The chains of one mode in tables that other programs write to, too."""

    fixed: Mapping[str, frozenset[str]]
    """By table: the chains with constant names."""
    entries: Mapping[str, frozenset[str]]
    """By table: the chains that built-in chains jump to, in versions of any age."""
    hashed: re.Pattern[str] | None = None
    """Matches the chains of single Service ports, in the table nat."""

    def is_ours(self, table: str, chain: str) -> bool:
        """Return True if a chain belongs to the mode, in any version."""
        if chain in self.fixed.get(table, ()):
            return True
        return table == "nat" and self.hashed is not None and self.hashed.fullmatch(chain) is not None


IPTABLES_CHAINS = ChainOwnership(
    {
        "nat": frozenset((SERVICES, NODE_PORTS, POSTROUTING, MARK_MASQ, MARK_STRANGERS, CANARY)),
        "filter": frozenset((SERVICES, NODE_PORTS, EXTERNAL_SERVICES, FORWARD, PROXY_FIREWALL, FIREWALL, CANARY)),
        "mangle": frozenset((CANARY,)),
    },
    {
        "nat": frozenset((SERVICES, POSTROUTING)),
        "filter": frozenset((SERVICES, EXTERNAL_SERVICES, NODE_PORTS, FORWARD, PROXY_FIREWALL, FIREWALL)),
    },
    # XLB is what EXT was called before 1.24; a node that ran such a kube-proxy still has them.
    re.compile(r"KUBE-(?:SVC|SVL|EXT|FW|SEP|XLB)-[A-Z2-7]{16}", re.ASCII),
)
"""The chains that kube-proxy makes in mode iptables."""


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_PAIRS = [one + other for one in _LETTERS for other in _LETTERS]
_HASH_BYTES = struct.Struct(">QH")


def chain_hash(identity: str) -> str:
    """Return the first 16 characters of base32(sha256(identity))."""
    # Ten bytes are sixteen characters. A big cluster has a hundred thousand chains, and base64.b32encode is slow.
    high, low = _HASH_BYTES.unpack_from(hashlib.sha256(identity.encode()).digest())
    pair = _PAIRS
    return (
        f"{pair[high >> 54]}{pair[high >> 44 & 1023]}{pair[high >> 34 & 1023]}{pair[high >> 24 & 1023]}"
        f"{pair[high >> 14 & 1023]}{pair[high >> 4 & 1023]}{pair[(high & 15) << 6 | low >> 10]}{pair[low & 1023]}"
    )


def service_id(name: ServicePortName) -> str:
    """Return the identity that chain names are derived from: `ns/name:port` and the protocol in lower case.

    An unnamed port leaves no colon. kube-proxy up to 1.17 left it, so dumps of these versions have other hashes.
    """
    return f"{name}{name.protocol.lower}"


def svc(name: ServicePortName) -> str:
    """Return the chain of the endpoints of the whole cluster."""
    return f"KUBE-SVC-{chain_hash(service_id(name))}"


def svl(name: ServicePortName) -> str:
    """Return the chain of this node's endpoints."""
    return f"KUBE-SVL-{chain_hash(service_id(name))}"


def ext(name: ServicePortName, variant: str = "") -> str:
    """Return the chain of the external traffic policy. `variant` distinguishes several of one Service port."""
    return f"KUBE-EXT-{chain_hash(service_id(name) + variant)}"


def fw(name: ServicePortName, variant: str = "") -> str:
    """Return the chain of the source ranges. `variant` distinguishes several of one Service port."""
    return f"KUBE-FW-{chain_hash(service_id(name) + variant)}"


def sep(name: ServicePortName, endpoint: Endpoint) -> str:
    """Return the chain of one endpoint of one Service port."""
    return sep_of(service_id(name), endpoint)


def sep_of(service: str, endpoint: Endpoint) -> str:
    """Return the chain of one endpoint, given the Service port's `service_id`."""
    return f"KUBE-SEP-{chain_hash(service + join_port(endpoint.address, endpoint.port))}"
