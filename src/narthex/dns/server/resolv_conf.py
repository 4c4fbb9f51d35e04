"""resolv.conf(5): the name servers and the search list of a machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import msgspec

from narthex.dns.corefile.settings import AutopathSettings, Upstream
from narthex.dns.message import names
from narthex.dns.server.event_loop import read_text
from narthex.model import address
from narthex.model.lines import without_long_lines_of

STUBS = frozenset({"127.0.0.53", "127.0.0.54"})
"""Addresses of systemd-resolved, which may forward to this server; in a pod nothing listens there."""
SYSTEMD_FILE = "/run/systemd/resolve/resolv.conf"
"""File in which systemd-resolved writes its own upstreams."""


class ResolvConf(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a resolv.conf."""

    nameservers: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    """Zones in lower case, with their trailing dot; the last `search` or `domain` line counts."""
    options: tuple[str, ...] = ()

    @property
    def ndots(self) -> int:
        """Number of dots from which on a name is first tried as it is."""
        found = [option[6:] for option in self.options if option.startswith("ndots:")]
        return min(int(found[-1]), 15) if found and found[-1].isdecimal() and found[-1].isascii() else 1


def parse_resolv_conf(text: str) -> ResolvConf:
    """Parse a resolv.conf. As in resolvers, unknown words and invalid lines are ignored."""
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
            search = [names.text(zone) for zone in map(names.wire_or_none, words[1:]) if zone is not None]
        elif words[0] == "options":
            options += words[1:]
    unique = tuple(dict.fromkeys(servers))
    return ResolvConf(nameservers=unique, search=tuple(dict.fromkeys(search)), options=tuple(options))


def split_upstreams(conf: ResolvConf, ours: Collection[str] = ()) -> tuple[tuple[Upstream, ...], tuple[str, ...]]:
    """Return the servers to forward to, and the skipped ones: local stubs, and our own addresses `ours`."""
    skipped = tuple(server for server in conf.nameservers if server in STUBS or server in ours)
    return tuple(Upstream(server) for server in conf.nameservers if server not in skipped), skipped


def upstreams_of_file(
    path: str, text: str | None, ours: tuple[str, ...], warn: Callable[[str], None], systemd: str = SYSTEMD_FILE
) -> tuple[Upstream, ...]:
    """Return the upstreams that the text of a resolv.conf names.

    Stubs are skipped with a warning; if it names nothing else, the file that systemd-resolved writes is used instead.
    """
    short, message = without_long_lines_of(text or "")
    if message:
        warn(f"{path}: {message}")
    upstreams, skipped = split_upstreams(parse_resolv_conf(short), ours)
    if not skipped:
        return upstreams
    reason = "a stub of this machine, or this server itself, which would cause a forwarding loop"
    if upstreams:
        warn(f"{path}: {', '.join(skipped)} skipped: {reason}")
        return upstreams
    try:
        upstreams, _ = split_upstreams(parse_resolv_conf(read_text(systemd)), ours)
    except OSError as error:
        warn(f"{path} names only {', '.join(skipped)}: {reason}; {systemd}: {error.strerror or error}")
        return ()
    found = ", ".join(str(each) for each in upstreams) or "none"
    warn(f"{path} names only {', '.join(skipped)}: {reason}; using the servers of {systemd}: {found}")
    return upstreams


def autopath_search_list(settings: AutopathSettings, warn: Callable[[str], None]) -> tuple[str, ...]:
    """Return the search list of plugin `autopath`: that of its file, or of this machine. Empty if it cannot be read."""
    path = settings.path or "/etc/resolv.conf"
    try:
        short, message = without_long_lines_of(read_text(path))
        if message:
            warn(f"autopath: {path}: {message}")
        return parse_resolv_conf(short).search
    except OSError as error:
        warn(f"autopath: {path} cannot be read: {error.strerror or error}")
        return ()


def _address(word: str) -> list[str]:
    try:
        # The zone index of a link-local server (fe80::1%eth0) has no meaning for sockets of another process.
        return [address(word)]
    except ValueError:
        return []
