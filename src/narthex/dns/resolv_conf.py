"""resolv.conf(5): which servers a machine asks, and its search list."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from narthex.dns.corefile.settings import Upstream
from narthex.dns.message import names
from narthex.model import net

STUBS = frozenset({"127.0.0.53", "127.0.0.54"})
"""Where systemd-resolved listens on a machine. It may ask us, and in a pod there is nobody at all."""
SYSTEMD_FILE = "/run/systemd/resolve/resolv.conf"
"""Where systemd-resolved writes the servers that it asks itself."""


class ResolvConf(msgspec.Struct, frozen=True, kw_only=True):
    """What is used of the file."""

    nameservers: tuple[str, ...] = ()
    """Addresses."""
    search: tuple[str, ...] = ()
    """Zones, lower case, with their dot; the last `search` or `domain` of the file counts."""
    options: tuple[str, ...] = ()

    @property
    def ndots(self) -> int:
        """Dots from which on a name is tried as it is first."""
        found = [option[6:] for option in self.options if option.startswith("ndots:")]
        return min(int(found[-1]), 15) if found and found[-1].isdecimal() and found[-1].isascii() else 1


def parse(text: str) -> ResolvConf:
    """Read the file. What resolvers pass over in silence is passed over here: unknown words, and lines that are broken."""
    servers: list[str] = []
    search: list[str] = []
    options: list[str] = []
    for line in text.splitlines():
        words = re.split(r"[#;]", line, maxsplit=1)[0].split()
        if len(words) < 2:
            continue
        if words[0] == "nameserver":
            servers += _address(words[1])
        elif words[0] in ("search", "domain"):
            search = [zone for word in words[1:] for zone in _zone(word)]
        elif words[0] == "options":
            options += words[1:]
    unique = tuple(dict.fromkeys(servers))
    return ResolvConf(nameservers=unique, search=tuple(dict.fromkeys(search)), options=tuple(options))


def upstreams(conf: ResolvConf, ours: Collection[str] = ()) -> tuple[tuple[Upstream, ...], tuple[str, ...]]:
    """The servers to forward to, and those left out: stubs of this machine, and addresses where we ourselves listen."""
    left_out = tuple(server for server in conf.nameservers if server in STUBS or server in ours)
    return tuple(Upstream(server) for server in conf.nameservers if server not in left_out), left_out


def _address(word: str) -> list[str]:
    try:
        # A link-local server's zone (fe80::1%eth0) means nothing to another process' sockets here.
        return [net.address(word)]
    except ValueError:
        return []


def _zone(word: str) -> list[str]:
    try:
        return [names.text(names.wire(word)).lower()]
    except ValueError:
        return []
