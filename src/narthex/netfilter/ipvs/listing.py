"""`ipvsadm -L -n`: virtual servers as people read them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from narthex.model.net import Protocol, split_port
from narthex.netfilter.ipvs.servers import RealServer, ServerKey, VirtualServer

_SERVER = re.compile(r"(TCP|UDP|SCTP|FWM)\s+(\S+)(?:\s+IPv6)?\s+(\w+)((?:\s+\S+)*)$")
_REAL = re.compile(r"->\s+(\S+:\d+)\s+(Masq|Route|Tunnel|Local)\s+(\d+)\b")
_HEADS = ("IP Virtual Server version", "Prot LocalAddress:Port", "-> RemoteAddress:Port")
_FORWARDS = {"Masq": "masquerade", "Route": "gateway", "Tunnel": "tunnel", "Local": "local"}
_SCHEDULERS = frozenset(("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos"))


class Lists:
    """Takes a text line by line."""

    def __init__(self) -> None:
        self._servers: dict[ServerKey, VirtualServer] = {}
        self._reals: dict[ServerKey, list[RealServer]] = {}
        self._now: ServerKey | None = None

    def take(self, line: str) -> bool:
        """Whether the line belongs to a list."""
        if line.startswith(_HEADS):
            return True
        server = _SERVER.match(line)
        if server is not None and server[3] in _SCHEDULERS:
            return self._server(server)
        real = _REAL.match(line)
        if real is None or self._now is None:
            return False
        try:
            address, port = split_port(real[1])
        except ValueError:
            return False
        self._reals[self._now].append(RealServer(address, port, int(real[3]), _FORWARDS[real[2]]))
        return True

    def _server(self, found: re.Match[str]) -> bool:
        self._now = None
        try:
            address, port = split_port(found[2])
        except ValueError:
            # Names instead of numbers, or a mark: no packet can be told to be meant.
            return True
        flags = found[4].split()
        seconds = None
        if "persistent" in flags:
            at = flags.index("persistent") + 1
            seconds = int(flags[at]) if at < len(flags) and flags[at].isdigit() else 360
        key = address, Protocol(found[1]), port
        self._servers[key] = VirtualServer(
            address=address,
            protocol=key[1],
            port=port,
            scheduler=found[3],
            persistence_seconds=seconds,
            hash_ports=any(flag.strip("()").endswith("-port") for flag in flags),
        )
        self._reals.setdefault(key, [])
        self._now = key
        return True

    def servers(self) -> Mapping[ServerKey, VirtualServer]:
        """What was listed."""
        return {
            key: msgspec.structs.replace(server, reals=tuple(sorted(self._reals[key], key=lambda real: real.sort_key)))
            for key, server in self._servers.items()
        }
