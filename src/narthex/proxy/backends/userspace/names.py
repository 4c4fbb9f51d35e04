"""Names of the chains of mode userspace (row 25.2), and which chains are ours.

The five of the old mode have their old names. KUBE-PORTALS-FIREWALL and KUBE-PORTALS-REFUSED are for what it did not
support: source ranges, and policies that leave no endpoint. KUBE-PORTALS-FORWARD and KUBE-PORTALS-PLAIN-TCP are for
connections that the relay hands over to the kernel. KUBE-PORTAL- chains are for frontends whose decisions depend on the
sender.
"""

from __future__ import annotations

import re

from narthex.model import ServicePortName
from narthex.proxy.backends.iptables.names import ChainOwnership, chain_hash, service_id

CONTAINER = "KUBE-PORTALS-CONTAINER"
"""Packets that arrive, mainly from pods."""
HOST = "KUBE-PORTALS-HOST"
"""Packets of processes on this node."""
NODE_PORT_CONTAINER = "KUBE-NODEPORT-CONTAINER"
NODE_PORT_HOST = "KUBE-NODEPORT-HOST"
NON_LOCAL = "KUBE-NODEPORT-NON-LOCAL"
"""Accepts redirected packets to the relay's ports, whatever firewall follows, and no others."""
FIREWALL = "KUBE-PORTALS-FIREWALL"
REFUSED = "KUBE-PORTALS-REFUSED"
FORWARD = "KUBE-PORTALS-FORWARD"
"""Accepts the packets of connections that the relay has handed over, whatever firewall follows."""
PLAIN_TCP = "KUBE-PORTALS-PLAIN-TCP"
"""Removes what the kernel could not rewrite in such a connection: TCP timestamps, which both sides count differently."""
PROBE = "KUBE-PORTALS-PROBE"
"""There for a moment, to find out whether the kernel can remove TCP options."""

_FIXED = {
    "nat": frozenset((CONTAINER, HOST, NODE_PORT_CONTAINER, NODE_PORT_HOST)),
    "filter": frozenset((NON_LOCAL, FIREWALL, REFUSED, FORWARD)),
    "mangle": frozenset((PLAIN_TCP, PROBE)),
}
USERSPACE_CHAINS = ChainOwnership(_FIXED, _FIXED, re.compile(r"KUBE-PORTAL-[A-Z2-7]{16}", re.ASCII))
"""The old mode jumped to all fixed chains from built-in chains."""


def portal(name: ServicePortName, variant: str) -> str:
    """Return the chain of one Service port. `variant` distinguishes several of one Service port."""
    return f"KUBE-PORTAL-{chain_hash(service_id(name) + variant)}"
