"""What a client accepts: objects, their metadata alone, tables, and the forms of discovery."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from narthex.lab.api.errors import ApiFault
from narthex.lab.api.requests import JSON


class Accepted(msgspec.Struct, frozen=True):
    """One of the things that a client accepts."""

    type: str
    form: str = ""
    """Such as Table; empty for objects as they are."""
    group: str = ""
    version: str = ""


def accepted(header: str) -> Iterator[Accepted]:
    """What an Accept header lists, in its order (upstream takes the first that it can serve, whatever its q)."""
    for part in header.split(","):
        type, *parameters = [each.strip() for each in part.split(";")]
        named = dict(each.partition("=")[::2] for each in parameters if "=" in each)
        if type:
            yield Accepted(type.lower(), named.get("as", ""), named.get("g", ""), named.get("v", ""))


def chosen(header: str, *forms: str) -> Accepted:
    """The first of what is accepted that can be served: JSON, plain or in one of these forms. Raises ApiFault 406."""
    offers = list(accepted(header)) or [Accepted(JSON)]
    for offer in offers:
        if offer.type in (JSON, "*/*", "application/*") and (not offer.form or offer.form in forms):
            return offer
    raise ApiFault(406, "NotAcceptable", f"only the following media types are accepted: {JSON}")
