"""The file format of a lab's history: JSON lines. `replay.py` replays it.

    {"history": 1, "lab": "default", "at": "2026-01-01T10:00:00.000000+00:00", "version": 1234}
    {"object": {...}, "kind": "Service"}                                initial objects
    {"change": 1235, "kind": "Pod", "name": "web", "namespace": "shop", "object": {...} or null, "at": ...}
    {"turn": "2026-01-01T10:00:01.5+00:00", "after": 1235, "upto": 1238}  the controllers wrote 1236 to 1238
    {"fault": {...}, "at": ...}  {"ended": 3, "at": ...}

Secrets are recorded without content. Controllers start without state when a recording begins, so the history contains
everything that they depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import msgspec

from narthex.lab.api.store import ObjectStore, StoreChange
from narthex.lab.faults import InjectedFault

FORMAT = 1
_SECRET = "Secret"


class HistoryStart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line."""

    history: int
    lab: str
    at: datetime
    version: int
    """Version of the last change before the recording."""


class InitialObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object that existed when the recording began."""

    object: dict[str, Any]
    kind: str


class ObjectChanged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new version of an object; None: it was deleted."""

    change: int
    kind: str
    namespace: str = ""
    name: str
    object: dict[str, Any] | None
    at: datetime


class ControllersRan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of the controllers until no work was left. Their writes precede this line."""

    turn: datetime
    """The time passed to the controllers."""
    after: int
    """Version that the controllers started from."""
    upto: int
    """Version of their last write."""


class FaultStarted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The start of a fault."""

    fault: InjectedFault
    at: datetime


class FaultEnded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of the fault with this number."""

    ended: int
    at: datetime


HistoryEntry = HistoryStart | InitialObject | ObjectChanged | ControllersRan | FaultStarted | FaultEnded
_KINDS: dict[str, type[HistoryEntry]] = {
    "history": HistoryStart,
    "change": ObjectChanged,
    "turn": ControllersRan,
    "fault": FaultStarted,
    "ended": FaultEnded,
    "kind": InitialObject,
}
"""By a field that only this entry has, or that no entry above has."""


_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODERS: dict[type[HistoryEntry], msgspec.json.Decoder[HistoryEntry]] = {
    kind: msgspec.json.Decoder(kind) for kind in _KINDS.values()
}


class InvalidHistory(ValueError):
    """A malformed history; the message names the line."""


def initial_entries(lab: str, store: ObjectStore, at: datetime) -> Iterator[HistoryEntry]:
    """Yield the first entries of a history."""
    yield HistoryStart(history=FORMAT, lab=lab, at=at, version=store.version)
    for kind in sorted(store.kinds()):
        for _, stored in store.entries(kind):
            yield InitialObject(object=_without_secrets(kind, stored.raw), kind=kind)


def change_entry(change: StoreChange, at: datetime) -> ObjectChanged:
    """Return the entry for a change."""
    after = change.after
    return ObjectChanged(
        change=change.version,
        kind=change.kind,
        namespace=change.key[0],
        name=change.key[1],
        object=None if after is None else _without_secrets(change.kind, after),
        at=at,
    )


def encode_line(entry: HistoryEntry) -> bytes:
    """Encode an entry as a line of the file."""
    return msgspec.json.encode(entry) + b"\n"


def read(lines: Iterable[bytes]) -> Iterator[HistoryEntry]:
    """Yield the entries of a file. An incomplete last line is ignored. Raises InvalidHistory."""
    begun_once = False
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            return
        try:
            names = _NAMES.decode(text)
            kind = next((kind for name, kind in _KINDS.items() if name in names), None)
            if kind is None:
                raise InvalidHistory(f"line {number}: not an entry of a history")
            entry = _DECODERS[kind].decode(text)
        except msgspec.MsgspecError as error:
            raise InvalidHistory(f"line {number}: {error}") from None
        if isinstance(entry, HistoryStart) is begun_once or (
            isinstance(entry, HistoryStart) and entry.history != FORMAT
        ):
            raise InvalidHistory(f"line {number}: a history starts with one line `history` of version {FORMAT}")
        begun_once = True
        yield entry


def _without_secrets(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Reduce a Secret to its name and type; annotations of `kubectl apply` may contain its data, too."""
    if kind != _SECRET:
        return raw
    meta = {name: raw["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
            if name in raw["metadata"]}  # fmt: skip
    return {"apiVersion": "v1", "kind": _SECRET, "metadata": meta, "type": raw.get("type", "")}
