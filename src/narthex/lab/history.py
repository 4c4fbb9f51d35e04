"""A lab's history as lines of JSON: the objects at its begin, then each change, each time the controllers had their turn, and
faults. `replay.py` goes through it again.

    {"history": 1, "lab": "default", "at": "2026-01-01T10:00:00.000000+00:00", "version": 1234}
    {"object": {…}, "kind": "Service"}                                  what there was
    {"change": 1235, "kind": "Pod", "name": "web", "namespace": "shop", "object": {…} or null, "at": …}
    {"turn": "2026-01-01T10:00:01.5+00:00", "after": 1235, "upto": 1238}  the controllers wrote 1236 to 1238
    {"fault": {…}, "at": …}  {"ended": 3, "at": …}

A Secret is there by name only. The controllers begin anew with a history, so that they know nothing that is not in it.
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
    """Of the last change before."""


class InitialObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object that there was at the begin."""

    object: dict[str, Any]
    kind: str


class ObjectChanged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of one object; None: it is gone."""

    change: int
    kind: str
    namespace: str = ""
    name: str
    object: dict[str, Any] | None
    at: datetime


class ControllersRan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controllers had their turn until nothing was left to do. What they wrote stands before this line."""

    turn: datetime
    """The moment that they were told."""
    after: int
    """They saw the versions up to this one."""
    upto: int
    """And wrote those up to this one."""


class FaultStarted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault began."""

    fault: InjectedFault
    at: datetime


class FaultEnded(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fault of this number ended."""

    ended: int
    at: datetime


HistoryEntry = HistoryStart | InitialObject | ObjectChanged | ControllersRan | FaultStarted | FaultEnded
_KINDS: dict[str, type[HistoryEntry]] = {
    "history": HistoryStart,
    "kind": InitialObject,
    "change": ObjectChanged,
    "turn": ControllersRan,
    "fault": FaultStarted,
    "ended": FaultEnded,
}


class InvalidHistory(ValueError):
    """What was read is no history; the message says where and why."""


def initial_entries(lab: str, store: ObjectStore, at: datetime) -> Iterator[HistoryEntry]:
    """What a history begins with."""
    yield HistoryStart(history=FORMAT, lab=lab, at=at, version=store.version)
    for kind in sorted(store.kinds()):
        for _, stored in store.entries(kind):
            yield InitialObject(object=_without_secrets(kind, stored.raw), kind=kind)


def change_entry(change: StoreChange, at: datetime) -> ObjectChanged:
    """One change."""
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
    """An entry as it stands in the file."""
    return msgspec.json.encode(entry) + b"\n"


def read(lines: Iterable[bytes]) -> Iterator[HistoryEntry]:
    """Entries of a file. A last line that was cut off counts as not written. Raises BadHistory."""
    begun_once = False
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            return
        try:
            names = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            kind = next(
                (_KINDS[name] for name in ("history", "change", "turn", "fault", "ended", "kind") if name in names),
                None,
            )
            if kind is None:
                raise InvalidHistory(f"line {number}: this is no entry of a history")
            entry = msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise InvalidHistory(f"line {number}: {error}") from None
        if isinstance(entry, HistoryStart) is begun_once or (
            isinstance(entry, HistoryStart) and entry.history != FORMAT
        ):
            raise InvalidHistory(f"line {number}: a history begins with one line `history`, of version {FORMAT}")
        begun_once = True
        yield entry


def _without_secrets(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """A Secret's name and type: what else it holds, the annotations of `kubectl apply` among it, stays where it is."""
    if kind != _SECRET:
        return raw
    meta = {name: raw["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
            if name in raw["metadata"]}  # fmt: skip
    return {"apiVersion": "v1", "kind": _SECRET, "metadata": meta, "type": raw.get("type", "")}
