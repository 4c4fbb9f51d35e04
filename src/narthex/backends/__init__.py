"""Dataplanes: each renders a plan into its kernel tool's rules. Pure. `BACKENDS` has them all, the default first."""

from typing import Any

from narthex.backends.base import Backend
from narthex.backends.iptables import IptablesBackend
from narthex.backends.ipvs import IpvsBackend
from narthex.backends.nftables import NftablesBackend
from narthex.backends.userspace import UserspaceBackend

BACKENDS: dict[str, Backend[Any, Any]] = {
    backend.name: backend for backend in (NftablesBackend(), IptablesBackend(), IpvsBackend(), UserspaceBackend())
}
"""By the `mode` of KubeProxyConfiguration."""

__all__ = ["BACKENDS"]
