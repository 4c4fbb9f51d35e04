"""The nftables table for ipMasq: constant rules, and sets that have the pods."""

from __future__ import annotations

from narthex.cni.plan import SetElement
from narthex.cni.result import IPConfig
from narthex.model.values import ip_version

TABLE = "narthex-masquerade"


def elements(ips: tuple[IPConfig, ...]) -> tuple[SetElement, ...]:
    """Return the elements of a pod's addresses."""
    return tuple(SetElement(f"pods{ip_version(ip.network.address)}", ip.network.address) for ip in ips)


def subnets(ips: tuple[IPConfig, ...]) -> tuple[SetElement, ...]:
    """Return the elements of the pod's networks, shared by their pods: traffic within them is not masqueraded."""
    return tuple(
        SetElement(f"near{ip_version(ip.network.address)}", 2 * ip.network.first, end=2 * ip.network.last) for ip in ips
    )


def frame() -> str:
    """Return the table without elements, in nft syntax."""
    sets = "".join(
        f"\tset pods{v} {{ typeof {ip} saddr; }}\n\tset near{v} {{ typeof {ip} saddr . {ip} daddr; flags interval; }}\n"
        for v, ip in ((4, "ip"), (6, "ip6"))
    )
    rules = "".join(
        f"\tchain leave{v} {{\n\t\t{ip} saddr . {ip} daddr @near{v} return\n\t\t{ip} daddr {multicast} return\n"
        "\t\tmasquerade\n\t}\n"
        for v, ip, multicast in ((4, "ip", "224.0.0.0/4"), (6, "ip6", "ff00::/8"))
    )
    begin = (
        "\tchain postrouting {\n\t\ttype nat hook postrouting priority srcnat + 10;\n"
        "\t\tip saddr @pods4 goto leave4\n\t\tip6 saddr @pods6 goto leave6\n\t}\n"
    )
    return f"table inet {TABLE} {{\n{sets}{rules}{begin}}}\n"
