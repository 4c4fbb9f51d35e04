"""Elements of large nft sets, as nft prints them: plain words that need no reader of words."""

from __future__ import annotations

import ipaddress

from narthex.netfilter.ast import (
    Accept,
    Atom,
    DropPacket,
    ElementData,
    ElementKey,
    Goto,
    Jump,
    Return,
    Verdict,
)

_VERDICTS: dict[str, Verdict] = {"accept": Accept(), "drop": DropPacket(), "return": Return()}


def plain_elements(text: str, data: str) -> dict[ElementKey, ElementData] | None:
    """The elements of `elements = { … }`; None when there is anything but addresses, networks, numbers, words and
    verdicts among them, which takes a reader of words."""
    if '"' in text:
        return None
    inside = text.partition("{")[2].rpartition("}")[0]
    if "{" in inside:
        return None
    elements: dict[ElementKey, ElementData] = {}
    for part in inside.split(","):
        key_text, colon, value = part.partition(" : ")
        if bool(colon) is not bool(data):
            if not part.strip():
                continue
            return None
        # Counters and time left stand behind the key and are no part of it.
        words = key_text.split()
        key: list[Atom] = []
        wanted = True
        for word in words:
            if word == ".":
                wanted = True
            elif wanted:
                atom = _atom(word)
                if atom is None:
                    return None
                key.append(atom)
                wanted = False
            else:
                break
        if not colon:
            elements[tuple(key)] = None
            continue
        found = _data(value.split(), data)
        if found is None:
            return None
        elements[tuple(key)] = found
    return elements


def _atom(word: str) -> Atom | None:
    if word.isdigit():
        return int(word)
    if "-" in word or "*" in word:
        return None
    if ":" in word and "." in word:
        try:
            return str(ipaddress.IPv6Address(word))
        except ValueError:
            return None
    return word


def _data(words: list[str], data: str) -> ElementData:
    if data == "verdict":
        if len(words) == 2 and words[0] in ("goto", "jump"):
            return Goto(words[1]) if words[0] == "goto" else Jump(words[1])
        return _VERDICTS.get(words[0]) if len(words) == 1 else None
    if len(words) == 3 and words[1] == "." and words[2].isdigit():
        address = _atom(words[0])
        return (address, int(words[2])) if isinstance(address, str) else None
    return None
