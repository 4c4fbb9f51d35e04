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

from narthex.lab.api.store import Change, Store
from narthex.lab.faults import Fault

FORMAT = 1
_SECRET = "Secret"


class Begin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The first line."""

    history: int
    lab: str
    at: datetime
    version: int
    """Of the last change before."""


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An object that there was at the begin."""

    object: dict[str, Any]
    kind: str


class Changed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version of one object; None: it is gone."""

    change: int
    kind: str
    namespace: str = ""
    name: str
    object: dict[str, Any] | None
    at: datetime


class Turned(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controllers had their turn until nothing was left to do. What they wrote stands before this line."""

    turn: datetime
    """The moment that they were told."""
    after: int
    """They saw the versions up to this one."""
    upto: int
    """And wrote those up to this one."""


class Broke(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault began."""

    fault: Fault
    at: datetime


class Mended(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fault of this number ended."""

    ended: int
    at: datetime


Entry = Begin | Held | Changed | Turned | Broke | Mended
_KINDS: dict[str, type[Entry]] = {
    "history": Begin,
    "kind": Held,
    "change": Changed,
    "turn": Turned,
    "fault": Broke,
    "ended": Mended,
}


class BadHistory(ValueError):
    """What was read is no history; the message says where and why."""


def begun(lab: str, store: Store, at: datetime) -> Iterator[Entry]:
    """What a history begins with."""
    yield Begin(history=FORMAT, lab=lab, at=at, version=store.version)
    for kind in sorted(store.kinds()):
        for _, stored in store.entries(kind):
            yield Held(object=_without_secrets(kind, stored.raw), kind=kind)


def changed(change: Change, at: datetime) -> Changed:
    """One change."""
    after = change.after
    return Changed(
        change=change.version,
        kind=change.kind,
        namespace=change.key[0],
        name=change.key[1],
        object=None if after is None else _without_secrets(change.kind, after),
        at=at,
    )


def line(entry: Entry) -> bytes:
    """An entry as it stands in the file."""
    return msgspec.json.encode(entry) + b"\n"


def read(lines: Iterable[bytes]) -> Iterator[Entry]:
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
                raise BadHistory(f"line {number}: this is no entry of a history")
            entry = msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise BadHistory(f"line {number}: {error}") from None
        if isinstance(entry, Begin) is begun_once or (isinstance(entry, Begin) and entry.history != FORMAT):
            raise BadHistory(f"line {number}: a history begins with one line `history`, of version {FORMAT}")
        begun_once = True
        yield entry


def _without_secrets(kind: str, raw: dict[str, Any]) -> dict[str, Any]:
    """A Secret's name and type: what else it holds, the annotations of `kubectl apply` among it, stays where it is."""
    if kind != _SECRET:
        return raw
    meta = {name: raw["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
            if name in raw["metadata"]}  # fmt: skip
    return {"apiVersion": "v1", "kind": _SECRET, "metadata": meta, "type": raw.get("type", "")}
