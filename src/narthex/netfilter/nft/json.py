"""`nft -j list ruleset`: put into nft's own words, which one reader reads for both.

The JSON is that of libnftables-json(5). Rules are put into words when their chain is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from narthex.netfilter.ast import Chain, Set, Table
from narthex.netfilter.lazy import Lazy, LazyChains
from narthex.netfilter.nft.json_words import rule_words, set_words
from narthex.netfilter.nft.parse import FAMILIES, read_chain, read_set


class _Names(msgspec.Struct):
    """What says where an object belongs."""

    family: str = ""
    table: str = ""
    name: str = ""
    chain: str = ""


_NOTHING = msgspec.Raw(b"")


class _Object(msgspec.Struct):
    table: msgspec.Raw = _NOTHING
    chain: msgspec.Raw = _NOTHING
    rule: msgspec.Raw = _NOTHING
    set: msgspec.Raw = _NOTHING
    map: msgspec.Raw = _NOTHING


class _Listing(msgspec.Struct):
    nftables: list[_Object]


class _Parts:
    """One table's objects, not yet read."""

    def __init__(self) -> None:
        self.chains: dict[str, Any] = {}
        self.rules: dict[str, list[msgspec.Raw]] = {}
        self.sets: dict[str, tuple[str, msgspec.Raw]] = {}


def read(text: str) -> tuple[list[tuple[Table, int]], list[tuple[int, str]]]:
    """The tables, each with the number of its rules; and what is wrong."""
    try:
        listing = msgspec.json.decode(text.encode(), type=_Listing)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        return [], [(0, f"the JSON of nft is torn: {error}")]
    tables: dict[tuple[str, str], _Parts] = {}
    troubles: list[tuple[int, str]] = []
    names = msgspec.json.Decoder(_Names)
    for number, each in enumerate(listing.nftables):
        raw = next((one for one in (each.table, each.chain, each.rule, each.set, each.map) if bytes(one)), None)
        if raw is None:
            continue
        try:
            said = names.decode(raw)
            key = said.family, said.table or said.name
            parts = tables.setdefault(key, _Parts())
            if bytes(each.chain):
                parts.chains[said.name] = msgspec.json.decode(raw)
            elif bytes(each.rule):
                parts.rules.setdefault(said.chain, []).append(raw)
            elif bytes(each.set) or bytes(each.map):
                parts.sets[said.name] = ("map" if bytes(each.map) else "set", raw)
        except msgspec.DecodeError as error:
            troubles.append((0, f"object {number} of the JSON: {error}"))
    found = [
        (_table(family, name, parts), sum(map(len, parts.rules.values())))
        for (family, name), parts in tables.items()
        if family in FAMILIES
    ]
    return found, troubles


def _table(family: str, name: str, parts: _Parts) -> Table:
    def chain(called: str) -> Chain:
        lines = [_hook_words(parts.chains[called])] if called in parts.chains else []
        lines += [_words(raw) for raw in parts.rules.get(called, ())]
        return read_chain("\n".join((*lines, "}", "")), called)

    def one(called: str) -> Set:
        kind, raw = parts.sets[called]
        try:
            return read_set("\n".join((*set_words(kind, msgspec.json.decode(raw)), "}", "")), called)
        except (KeyError, TypeError, ValueError) as error:
            return Set(name=called, key=(), unsupported=f"its JSON: {error}")

    known = dict.fromkeys((*parts.chains, *parts.rules))
    bases = tuple(called for called, held in parts.chains.items() if "hook" in held)

    return Table(
        family=FAMILIES[family],
        name=name,
        chains=LazyChains(known, chain, bases, _no_lines, str),
        sets=Lazy(parts.sets, one),
    )


def _no_lines(_chain: str) -> list[int]:
    """JSON stands in no lines."""
    return []


def _hook_words(chain: dict[str, Any]) -> str:
    if "hook" not in chain:
        return ""
    return (
        f"type {chain.get('type', 'filter')} hook {chain['hook']} priority {int(chain.get('prio', 0))}; "
        f"policy {chain.get('policy', 'accept')};"
    )


def _words(raw: msgspec.Raw) -> str:
    held: dict[str, Any] = msgspec.json.decode(raw)
    comment = str(held.get("comment", "")).replace('"', "'").replace("\n", " ")
    expressions: Sequence[Any] = held.get("expr", ())
    return rule_words(expressions) + (f' comment "{comment}"' if comment else "")
