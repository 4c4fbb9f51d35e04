"""The lab's cluster DNS: the Service that every pod's resolv.conf names, and that resolv.conf.

Each node answers itself (`narthex node --dns`), at the Service's own address where the mode allows it, and at its own
addresses, where the Service leads to from elsewhere. A Service of this name among the user's manifests wins.
"""

from __future__ import annotations

from narthex.model.names import NamespacedName

DOMAIN = "cluster.local"
SERVICE = NamespacedName("kube-system", "kube-dns")
ADDRESSES = ("10.96.0.10", "fd00:10:96::a")
"""Where clusters have it by custom: the tenth address of the range."""
DNS_PORT = 53


def own_addresses(mode: str) -> tuple[str, ...]:
    """The Service's addresses that nodes have themselves. In mode ipvs they are on the proxy's own link."""
    return () if mode == "ipvs" else ADDRESSES


def corefile() -> str:
    """What every node answers. Nobody beyond the lab can be asked, so the root is answered here, too: a name that is not
    the cluster's does not exist, and no resolver waits for it."""
    zones = f"{DOMAIN} in-addr.arpa ip6.arpa"
    return (
        f"{zones} {{\n    errors\n    kubernetes {zones} {{\n        pods insecure\n    }}\n"
        "    prometheus :9353\n    loadbalance\n}\n"
        ". {\n    errors\n    kubernetes .\n}\n"
    )


def resolv_conf(namespace: str) -> str:
    """What a kubelet writes for a pod (row S22)."""
    zones = f"{namespace}.svc.{DOMAIN} svc.{DOMAIN} {DOMAIN}"
    return f"search {zones}\nnameserver {ADDRESSES[0]}\noptions ndots:5\n"
