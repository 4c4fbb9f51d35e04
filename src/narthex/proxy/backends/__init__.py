"""The backends of all modes: each renders a plan as rules of its kernel tool. Pure.

A backend is loaded when it is used: a proxy runs one mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from narthex.proxy.backends.base import Backend

_CLASSES = {
    "nftables": "NftablesBackend",
    "iptables": "IptablesBackend",
    "ipvs": "IpvsBackend",
    "userspace": "UserspaceBackend",
}
"""By the `mode` of KubeProxyConfiguration, the default first; each is in `MODE/backend.py`."""


@cache
def _backend(mode: str) -> Backend[Any, Any]:
    backend: Backend[Any, Any] = getattr(import_module(f"{__name__}.{mode}.backend"), _CLASSES[mode])()
    return backend


class _Backends(Mapping[str, Backend[Any, Any]]):
    """A mapping that creates each backend on first use."""

    def __getitem__(self, mode: str) -> Backend[Any, Any]:
        if mode not in _CLASSES:
            raise KeyError(mode)
        return _backend(mode)

    def __iter__(self) -> Iterator[str]:
        return iter(_CLASSES)

    def __len__(self) -> int:
        return len(_CLASSES)

    def __contains__(self, mode: object) -> bool:
        return mode in _CLASSES


BACKENDS: Mapping[str, Backend[Any, Any]] = _Backends()

__all__ = ["BACKENDS"]
