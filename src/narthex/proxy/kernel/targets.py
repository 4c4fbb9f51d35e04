"""Which Target belongs to which mode. Each is imported when it is asked for: a node runs one mode."""

from __future__ import annotations

from typing import Any

from narthex.model.net import IPFamily
from narthex.proxy.backends.base import Target


def target_for(mode: str, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
    """The Target of a mode, for one family, in a named network namespace (None: the present one).

    Raises ValueError for a mode that has none.
    """
    if mode == "nftables":
        from narthex.proxy.kernel.nftables import NftablesTarget

        return NftablesTarget(family, namespace)
    if mode == "iptables":
        from narthex.proxy.kernel.iptables import IptablesTarget

        return IptablesTarget(family, namespace)
    if mode == "ipvs":
        from narthex.proxy.kernel.ipvs.target import IpvsTarget

        return IpvsTarget(family, namespace)
    if mode == "userspace":
        from narthex.proxy.kernel.userspace import UserspaceTarget

        return UserspaceTarget(family, namespace)
    raise ValueError(f"{mode!r} is not a proxy mode: use nftables, iptables, ipvs or userspace")


def rules_in_force(mode: str, family: IPFamily, namespace: str | None = None) -> Any:
    """The rules there as somebody sees them who is not the proxy that wrote them; None when there are none.

    Raises ApplyError when they cannot be read, ValueError for a mode that has no Target.
    """
    if mode == "userspace":
        from narthex.proxy.kernel.userspace import UserspaceTarget

        return UserspaceTarget(family, namespace).look()
    return target_for(mode, family, namespace).read()
