"""The backends of all modes: each renders a plan as rules of its kernel tool. Pure.

A backend is loaded when it is used: a proxy runs one mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from narthex.proxy.backends.base import Backend


def _nftables() -> Backend[Any, Any]:
    from narthex.proxy.backends.nftables.backend import NftablesBackend

    return NftablesBackend()


def _iptables() -> Backend[Any, Any]:
    from narthex.proxy.backends.iptables.backend import IptablesBackend

    return IptablesBackend()


def _ipvs() -> Backend[Any, Any]:
    from narthex.proxy.backends.ipvs.backend import IpvsBackend

    return IpvsBackend()


def _userspace() -> Backend[Any, Any]:
    from narthex.proxy.backends.userspace.backend import UserspaceBackend

    return UserspaceBackend()


class _Backends(Mapping[str, Backend[Any, Any]]):
    """A mapping that creates each backend on first use."""

    def __init__(self, **makers: Callable[[], Backend[Any, Any]]) -> None:
        self._makers = {mode: cache(make) for mode, make in makers.items()}

    def __getitem__(self, mode: str) -> Backend[Any, Any]:
        return self._makers[mode]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __contains__(self, mode: object) -> bool:
        return mode in self._makers


BACKENDS: Mapping[str, Backend[Any, Any]] = _Backends(
    nftables=_nftables, iptables=_iptables, ipvs=_ipvs, userspace=_userspace
)
"""By the `mode` of KubeProxyConfiguration, the default first."""

__all__ = ["BACKENDS"]
