"""The two kinds of iptables on a machine: `nft` writes to nf_tables, `legacy` to tables of its own.

Neither sees the other's rules, the kernel obeys both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from narthex.model.net import IPFamily

VARIANTS = ("nft", "legacy")


def plain_command(family: IPFamily) -> str:
    """The command that the system chose a variant for."""
    return "iptables" if family is IPFamily.IPV4 else "ip6tables"


def default_variant(family: IPFamily) -> str:
    """What the plain command is. One that says nothing of nf_tables is older than nf_tables."""
    found = shutil.which(f"{plain_command(family)}-restore")
    return "nft" if found is not None and "nft" in Path(found).resolve().name else "legacy"


def command_of(family: IPFamily, variant: str) -> str | None:
    """What to start for a variant: `iptables-legacy`, say, to which `-save` and `-restore` are appended. None: it is
    not installed."""
    plain = plain_command(family)
    for name in (f"{plain}-{variant}", plain):
        fits = name != plain or default_variant(family) == variant
        if fits and shutil.which(f"{name}-save") and shutil.which(f"{name}-restore"):
            return name
    return None
