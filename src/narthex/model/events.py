"""What a source tells the Store: an object is there, is gone, or all of a kind have been listed."""

from __future__ import annotations

import msgspec

from narthex.model.names import NamespacedName
from narthex.model.objects import AnyObject


class Upsert(msgspec.Struct, frozen=True):
    """The object exists and looks like this."""

    object: AnyObject


class Delete(msgspec.Struct, frozen=True):
    """The object is gone."""

    kind: str
    """Name of a class in `model.objects`: `Service`, `EndpointSlice`, ..."""
    key: NamespacedName


class Synced(msgspec.Struct, frozen=True):
    """The source has told everything it knew when it was opened; nothing is written before this (row 1.15)."""


Event = Upsert | Delete | Synced
