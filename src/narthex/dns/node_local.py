"""Answering on the node itself: addresses that pods ask, and rules that keep connection tracking out of it.

A question to a Service goes through NAT, and two questions from one socket at once (A and AAAA) may race for one entry of
connection tracking: one is dropped, and the client waits five seconds (kubernetes issue 56903). Here the node has the
addresses itself, a link-local one and those of the DNS Service, and their packets are not tracked, so that no NAT sees
them.

Link and tables are bound to the server's process: the kernel takes both away when it ends, however that comes about, and
the DNS Service leads to its endpoints as before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from narthex.model.net import FAMILIES, address, family_of

TABLE = "narthex-dns"
LINK_LOCAL = "169.254.20.10"
"""Where the field's node-local caches listen (row S21)."""


def tables(addresses: Sequence[str], ports: Collection[int] = (53,)) -> str:
    """nft text: a table for each family that has an address. A table of an owner goes with it (Linux 5.12).

    Raises ValueError for what is no address.
    """
    return "".join(
        _table(family.nft, chosen, sorted(ports))
        for family in FAMILIES
        if (chosen := sorted({address(each) for each in addresses if family_of(each) is family}))
    )


def _table(ip: str, addresses: list[str], ports: list[int]) -> str:
    where, at = ", ".join(addresses), ", ".join(map(str, ports))
    to = f"{ip} daddr {{ {where} }} meta l4proto {{ tcp, udp }} th dport {{ {at} }} notrack"
    back = f"{ip} saddr {{ {where} }} meta l4proto {{ tcp, udp }} th sport {{ {at} }} notrack"
    return (
        f"table {ip} {TABLE} {{\n\tflags owner\n"
        f"\tchain prerouting {{\n\t\ttype filter hook prerouting priority raw;\n\t\t{to}\n\t}}\n"
        f"\tchain output {{\n\t\ttype filter hook output priority raw;\n\t\t{to}\n\t\t{back}\n\t}}\n}}\n"
    )
