"""The API's objects as Narthex reads them: a Snapshot that follows the registry."""

from __future__ import annotations

from typing import Any, Protocol

from narthex.lab.api.errors import ApiFault
from narthex.model.decode.objects import KINDS, decode
from narthex.model.names import NamespacedName
from narthex.model.store import Delete, Event, Snapshot, Store, Synced, Upsert

_OF_GROUPS = {"IPAddressPool.metallb.io": "IPAddressPool", "L2Advertisement.metallb.io": "L2Advertisement"}
"""Custom kinds, as the registry calls them."""
_REGISTERED = {**{kind: kind for kind in KINDS if kind not in _OF_GROUPS.values()}, **_OF_GROUPS}


class _Registry(Protocol):
    @property
    def version(self) -> int: ...

    def list(self, kind: str, namespace: str = "") -> list[dict[str, Any]]: ...

    def changes_since(self, version: int) -> Any: ...


class Mirror:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._store = Store()
        self._version = -1

    def follow(self, registry: _Registry) -> Snapshot:
        """All there is now. The caller holds the registry's lock. An object that cannot be read is left out."""
        try:
            if self._version < 0:
                raise ApiFault(410, "Expired", "nothing is known yet")
            events = [
                event
                for change in registry.changes_since(self._version)
                if change.kind in _REGISTERED
                for event in _event(_REGISTERED[change.kind], change.key, change.after)
            ]
        except ApiFault:
            self._store = Store()
            events = [
                event
                for kind, ours in _REGISTERED.items()
                for raw in registry.list(kind)
                for event in _event(ours, _key(raw), raw)
            ]
            events.append(Synced())
        for event in events:
            self._store.apply(event)
        self._version = registry.version
        return self._store.snapshot


def _event(kind: str, key: tuple[str, str], raw: dict[str, Any] | None) -> list[Event]:
    if raw is None:
        return [Delete(kind, NamespacedName(*key))]
    made = decode(raw).object
    return [] if made is None else [Upsert(made)]


def _key(raw: dict[str, Any]) -> tuple[str, str]:
    return raw["metadata"].get("namespace") or "", raw["metadata"]["name"]
