"""Names of the chains of mode userspace (row 25.2), and which chains are ours there.

The five of the old mode have their old names. KUBE-PORTALS-FIREWALL and KUBE-PORTALS-REFUSED are for what it did not
do: source ranges, and policies that leave no endpoint. KUBE-PORTAL- chains are for frontends where senders fare
differently.
"""

from __future__ import annotations

import re

from narthex.model.names import ServicePortName
from narthex.proxy.backends.iptables.names import ChainOwnership, chain_hash, service_id

CONTAINER = "KUBE-PORTALS-CONTAINER"
"""What comes in from elsewhere, pods above all."""
HOST = "KUBE-PORTALS-HOST"
"""What processes on this node send."""
NODE_PORT_CONTAINER = "KUBE-NODEPORT-CONTAINER"
NODE_PORT_HOST = "KUBE-NODEPORT-HOST"
NON_LOCAL = "KUBE-NODEPORT-NON-LOCAL"
"""Opens the relay's ports to what was redirected there, whatever firewall comes behind, and to nothing else."""
FIREWALL = "KUBE-PORTALS-FIREWALL"
REFUSED = "KUBE-PORTALS-REFUSED"

FIXED = {
    "nat": frozenset((CONTAINER, HOST, NODE_PORT_CONTAINER, NODE_PORT_HOST)),
    "filter": frozenset((NON_LOCAL, FIREWALL, REFUSED)),
}
_HASHED = re.compile(r"KUBE-PORTAL-[A-Z2-7]{16}", re.ASCII)


def is_ours(table: str, chain: str) -> bool:
    """Whether a chain is one of mode userspace."""
    return chain in FIXED.get(table, ()) or (table == "nat" and _HASHED.fullmatch(chain) is not None)


USERSPACE_CHAINS = ChainOwnership(
    is_ours,
    {
        # The old mode jumped to all four from built-in chains.
        "nat": FIXED["nat"],
        "filter": FIXED["filter"],
    },
)


def portal(name: ServicePortName, variant: str) -> str:
    """Chain of one Service port. `variant` tells its several ones apart."""
    return f"KUBE-PORTAL-{chain_hash(service_id(name) + variant)}"
