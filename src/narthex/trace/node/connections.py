"""The connection table as `conntrack -L` prints it, asked without being taken apart whole: busy nodes have a million lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from narthex.model.net import Protocol, address
from narthex.trace.follow.views import TrackedConnection

LINE = re.compile(r"^(?:ipv[46]\s+\d+\s+)?(tcp|udp|sctp|icmp|icmpv6|dccp|udplite|gre)\s+\d+\s.*\bsrc=", re.MULTILINE)
_WORD = re.compile(r"(\w+)=(\S+)")
_FLAG = re.compile(r"\[(\w+)\]")
_STATE = re.compile(r"^(?:ipv[46]\s+\d+\s+)?\w+\s+\d+\s+(?:(\d+)\s+)?(?:([A-Z_0-9]+)\s+)?src=")


class ConntrackListing:
    """A text of `conntrack -L`, in the form of `narthex.trace.follow.views.Connections`."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __len__(self) -> int:
        return sum(1 for _ in LINE.finditer(self._text))

    def to(self, protocol: Protocol, address: str, port: int) -> tuple[TrackedConnection, ...]:
        """The connections whose first packet went there; port 0: to any."""
        want = f"dst={address} "
        return tuple(
            each
            for each in self._holding(want)
            if each.destination == address and each.protocol == protocol.lower and port in (0, each.port)
        )

    def replied_by(self, address: str) -> tuple[TrackedConnection, ...]:
        """The connections that are answered from there."""
        return tuple(each for each in self._holding(f"src={address} ") if each.reply_source == address)

    def all(self) -> Iterator[TrackedConnection]:
        """Each connection."""
        for line in self._text.splitlines():
            found = read_line(line)
            if found is not None:
                yield found

    def _holding(self, words: str) -> Iterator[TrackedConnection]:
        position = self._text.find(words)
        while position >= 0:
            start = self._text.rfind("\n", 0, position) + 1
            end = self._text.find("\n", position)
            end = len(self._text) if end < 0 else end
            found = read_line(self._text[start:end])
            if found is not None:
                yield found
            position = self._text.find(words, end)


def read_line(line: str) -> TrackedConnection | None:
    """One line; None when it is no connection."""
    kind = LINE.match(line)
    words = _WORD.findall(line)
    sides = [index for index, (key, _) in enumerate(words) if key == "src"]
    if kind is None or len(sides) < 2:
        return None
    there, back = dict(words[sides[0] : sides[1]]), dict(words[sides[1] :])
    state = _STATE.match(line)
    try:
        return TrackedConnection(
            protocol="icmp" if kind[1] == "icmpv6" else kind[1],
            source=address(there["src"]),
            destination=address(there["dst"]),
            source_port=int(there.get("sport", 0)),
            port=int(there.get("dport", 0)),
            reply_source=address(back["src"]),
            reply_destination=address(back["dst"]),
            reply_source_port=int(back.get("sport", 0)),
            reply_port=int(back.get("dport", 0)),
            state=(state[2] or "") if state else "",
            flags=tuple(_FLAG.findall(line)),
            mark=int(back.get("mark", 0)),
            zone=int(back.get("zone", 0)),
            seconds=int(state[1] or 0) if state else 0,
            text=" ".join(line.split()),
        )
    except (KeyError, ValueError):
        return None
