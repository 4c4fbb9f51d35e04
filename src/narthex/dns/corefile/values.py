"""The values in a Corefile's lines: zones, addresses, times and numbers, each fault with its line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from narthex.dns.corefile.settings import Listen, Position, Upstream, Zones
from narthex.dns.corefile.tree import Node, Outline
from narthex.dns.message import names
from narthex.model import duration as durations
from narthex.model import net
from narthex.model.problem import one_of, quoted

RCODES = (
    "NOERROR",
    "FORMERR",
    "SERVFAIL",
    "NXDOMAIN",
    "NOTIMP",
    "REFUSED",
    "YXDOMAIN",
    "YXRRSET",
    "NXRRSET",
    "NOTAUTH",
)
"""Names of response codes 0 to 9."""

_ZONE = re.compile(r"[A-Za-z0-9_./*-]+", re.ASCII)


class Line:
    """One line of a plugin: its words as values, and where a fault of theirs is noted."""

    def __init__(self, node: Node, outline: Outline, of: str = "") -> None:
        self.node = node
        self.words = node.arguments
        self._outline = outline
        self._of = f"{of}: {node.name}" if of else node.name

    @property
    def name(self) -> str:
        """The plugin or option."""
        return self.node.name

    @property
    def where(self) -> Position:
        """The line's place."""
        return self.node.where

    def error(self, message: str) -> None:
        """Note a fault of this line."""
        self._outline.error(self.node.where, f"{self._of}: {message}")

    def warning(self, message: str) -> None:
        """Note what works, but probably not as meant."""
        self._outline.warning(self.node.where, f"{self._of}: {message}")

    def takes(self, least: int, most: int | None = None) -> bool:
        """Whether there are so many arguments; an error when not. `most` None: no limit."""
        count = len(self.words)
        if count >= least and (most is None or count <= most):
            return True
        if most == 0:
            self.error("takes no argument")
        elif most is None:
            self.error(f"takes at least {least} argument{'s'[: least != 1]}, here are {count}")
        else:
            span = f"{least}" if least == most else f"{least} to {most}"
            self.error(f"takes {span} argument{'s'[: span != '1']}, here are {count}")
        return False

    def takes_no_block(self) -> None:
        """Note it when there are braces."""
        if self.node.children is not None:
            self.error("takes no { }")

    def options(self, known: Iterable[str], other: bool = False) -> Iterator[Line]:
        """The lines in the braces; unknown ones are faults and left out, unless `other` lets them through."""
        known = tuple(known)
        for node in self.node.children or ():
            line = Line(node, self._outline, self._of)
            if node.name in known or other:
                if node.children is not None:
                    line.takes_no_block()
                yield line
            else:
                self._outline.error(
                    node.where, f"{self._of}: unknown option {quoted(node.name)}; known are {one_of(known)}"
                )

    def whole(self, word: str, low: int, high: int = 10**9) -> int | None:
        """A whole number in these bounds."""
        if re.fullmatch(r"[+-]?\d{1,12}", word, re.ASCII):
            if low <= int(word) <= high:
                return int(word)
            self.error(f"{quoted(word)} is outside {low}-{high}" if high < 10**9 else f"{quoted(word)} is below {low}")
        else:
            self.error(f"{quoted(word)} is not a whole number")
        return None

    def duration(self, word: str, low: float = 0.0, high: float = 86400.0 * 365) -> float | None:
        """Seconds of a Go duration in these bounds."""
        try:
            seconds = durations.duration(word)
        except ValueError as error:
            self.error(f"{quoted(word)} {error}")
            return None
        if low <= seconds <= high:
            return seconds
        self.error(f"{quoted(word)} is outside {durations.duration_text(low)} to {durations.duration_text(high)}")
        return None

    def zones(self, words: Iterable[str], otherwise: Zones = ()) -> Zones:
        """Zones of names and networks; `otherwise` when there is no word."""
        words = tuple(words)
        found: list[str] = []
        for word in words:
            try:
                found += zones(word)
            except ValueError as error:
                self.error(f"zone {quoted(word)} {error}")
        return tuple(dict.fromkeys(found)) if words else otherwise

    def rcodes(self) -> tuple[int, ...]:
        """The response codes that the arguments name."""
        found = []
        for word in self.words:
            if word.upper() in RCODES:
                found.append(RCODES.index(word.upper()))
            else:
                self.error(f"{quoted(word)} is not a response code; known are {one_of(RCODES)}")
        return tuple(dict.fromkeys(found))

    def listen(self, word: str) -> Listen | None:
        """Host and port to listen on."""
        host, colon, port = word.rpartition(":")
        if not colon or not _port(port) or not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*", host, re.ASCII):
            self.error(f"{quoted(word)} is not a place to listen on, such as :8080 or 127.0.0.1:8080")
            return None
        return Listen(host.strip("[]"), int(port))


def zones(word: str) -> Zones:
    """The zone of a name, or the reverse zones of a network in CIDR form (128 at most). Raises ValueError."""
    if "/" in word and re.fullmatch(r"[0-9a-fA-F.:]+/\d{1,3}", word, re.ASCII):
        return reverse_zones(word)
    if not _ZONE.fullmatch(word):
        raise ValueError("is neither a name nor a network")
    return (names.text(names.wire(word)).lower(),)


def reverse_zones(cidr: str) -> Zones:
    """The zones below in-addr.arpa or ip6.arpa whose names are the addresses of a network. Raises ValueError."""
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError as error:
        raise ValueError(f"is not a network: {error}") from error
    step, end = (8, "in-addr.arpa.") if network.version == 4 else (4, "ip6.arpa.")
    count = -(-network.prefixlen // step)
    found = []
    for subnet in network.subnets(new_prefix=count * step):
        digits = (
            str(subnet.network_address).split(".")
            if network.version == 4
            else list(subnet.network_address.exploded.replace(":", ""))
        )
        found.append("".join(f"{label}." for label in reversed(digits[:count])) + end)
    return tuple(found)


def upstream(word: str) -> Upstream | None:
    """The server that a word means, None when it is no address. Raises ValueError for one that cannot be asked."""
    transport, scheme, rest = word.rpartition("://")
    if scheme and transport not in ("dns", "tls"):
        raise ValueError(f"{quoted(transport)} is not supported; dns:// and tls:// are")
    host, port = rest, ""
    if bracketed := re.fullmatch(r"\[([^]]*)\](?::(.*))?", rest):
        host, port = bracketed[1], bracketed[2] or ""
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    try:
        address = net.address(host)
    except ValueError:
        if scheme:
            raise ValueError(f"{quoted(host)} is not an address") from None
        return None
    if port and not _port(port):
        raise ValueError(f"{quoted(port)} is not a port (1-65535)")
    if transport == "tls":
        return Upstream(address, int(port or 853), "tls")
    return Upstream(address, int(port or 53))


def _port(word: str) -> bool:
    return bool(re.fullmatch(r"\d{1,5}", word, re.ASCII)) and 1 <= int(word) <= 65535
