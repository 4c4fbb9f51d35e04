"""The two variants of iptables: `nft` writes to nf_tables, `legacy` to tables of its own.

Neither variant shows the other's rules; the kernel applies both.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from narthex.model import IPFamily

VARIANTS = ("nft", "legacy")


def plain_command(family: IPFamily) -> str:
    """Return the command for which the system has selected a variant."""
    return "iptables" if family is IPFamily.IPV4 else "ip6tables"


def default_variant(family: IPFamily) -> str:
    """Return the variant of the plain command. One that does not mention nf_tables predates it."""
    found = shutil.which(f"{plain_command(family)}-restore")
    return "nft" if found is not None and "nft" in Path(found).resolve().name else "legacy"


def command_of(family: IPFamily, variant: str) -> str | None:
    """Return the command of a variant, such as `iptables-legacy`; None if it is not installed.

    `-save` and `-restore` are appended to it.
    """
    plain = plain_command(family)
    for name in (f"{plain}-{variant}", plain):
        fits = name != plain or default_variant(family) == variant
        if fits and shutil.which(f"{name}-save") and shutil.which(f"{name}-restore"):
            return name
    return None
