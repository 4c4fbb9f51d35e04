"""A directive of a Corefile: the arguments and options of a plugin as typed values, with errors at their line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator

from narthex.dns.corefile.settings import DEFAULT_PORT, DEFAULT_TLS_PORT, HttpEndpoint, Upstream, Zones
from narthex.dns.corefile.syntax import CorefileNode, CorefileReader
from narthex.dns.message import names, wire
from narthex.model import address, one_of, quoted
from narthex.model.duration import duration, duration_text

_ZONE = re.compile(r"[A-Za-z0-9_./*-]+", re.ASCII)


class Directive:
    """The line of a plugin or option: parses its words and reports errors at its position."""

    def __init__(self, node: CorefileNode, outline: CorefileReader, of: str = "") -> None:
        self.node = node
        self.words = node.arguments
        self._outline = outline
        self._of = f"{of}: {node.name}" if of else node.name

    @property
    def name(self) -> str:
        """Name of the plugin or option."""
        return self.node.name

    def error(self, message: str) -> None:
        """Report an error of this line."""
        self._outline.error(self.node.where, f"{self._of}: {message}")

    def warning(self, message: str) -> None:
        """Report a warning about this line."""
        self._outline.warning(self.node.where, f"{self._of}: {message}")

    def takes(self, least: int, most: int | None = None) -> bool:
        """Return True if the number of arguments is in range, otherwise report an error. `most` None: no limit."""
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
        """Report an error if the line has a block."""
        if self.node.children is not None:
            self.error("takes no { }")

    def options(self, known: Iterable[str], other: bool = False) -> Iterator[Directive]:
        """Yield the options in the block. Unknown ones are errors unless `other` is set."""
        known = tuple(known)
        for node in self.node.children or ():
            line = Directive(node, self._outline, self._of)
            if node.name in known or other:
                if node.children is not None:
                    line.takes_no_block()
                yield line
            else:
                self._outline.error(
                    node.where, f"{self._of}: unknown option {quoted(node.name)}; known are {one_of(known)}"
                )

    def whole(self, word: str, low: int, high: int = 10**9) -> int | None:
        """Parse an integer within bounds; None after an error."""
        if re.fullmatch(r"[+-]?\d{1,12}", word, re.ASCII):
            if low <= int(word) <= high:
                return int(word)
            self.error(f"{quoted(word)} is outside {low}-{high}" if high < 10**9 else f"{quoted(word)} is below {low}")
        else:
            self.error(f"{quoted(word)} is not a whole number")
        return None

    def duration(self, word: str, low: float = 0.0, high: float = 86400.0 * 365) -> float | None:
        """Parse a Go duration within bounds of seconds; None after an error."""
        try:
            seconds = duration(word)
        except ValueError as error:
            self.error(f"{quoted(word)} {error}")
            return None
        if low <= seconds <= high:
            return seconds
        self.error(f"{quoted(word)} is outside {duration_text(low)} to {duration_text(high)}")
        return None

    def zones(self, words: Iterable[str], otherwise: Zones = ()) -> Zones:
        """Parse zones given as names or networks; `otherwise` is the result without words."""
        words = tuple(words)
        found: list[str] = []
        for word in words:
            try:
                found += zones(word)
            except ValueError as error:
                self.error(f"zone {quoted(word)} {error}")
        return tuple(dict.fromkeys(found)) if words else otherwise

    def rcodes(self) -> tuple[int, ...]:
        """Parse the arguments as response codes."""
        found = []
        for word in self.words:
            if word.upper() in wire.RCODES:
                found.append(wire.RCODES.index(word.upper()))
            else:
                self.error(f"{quoted(word)} is not a response code; known are {one_of(wire.RCODES)}")
        return tuple(dict.fromkeys(found))

    def listen(self, word: str) -> HttpEndpoint | None:
        """Parse the host and port of an HTTP endpoint; None after an error."""
        host, colon, port = word.rpartition(":")
        if not colon or not is_port(port) or not re.fullmatch(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*", host, re.ASCII):
            self.error(f"{quoted(word)} is not an address to listen on such as :8080 or 127.0.0.1:8080")
            return None
        return HttpEndpoint(host.strip("[]"), int(port))


def zones(word: str) -> Zones:
    """Return the zone of a name, or the reverse zones (at most 128) of a network in CIDR notation. Raises ValueError."""
    if "/" in word and re.fullmatch(r"[0-9a-fA-F.:]+/\d{1,3}", word, re.ASCII):
        return reverse_zones(word)
    if not _ZONE.fullmatch(word):
        raise ValueError("is neither a name nor a network")
    return (names.text(names.wire(word)).lower(),)


def reverse_zones(cidr: str) -> Zones:
    """Return the zones in in-addr.arpa or ip6.arpa that cover a network. Raises ValueError."""
    try:
        network = ipaddress.ip_network(cidr, strict=False)
    except ValueError as error:
        raise ValueError(f"is not a network: {error}") from error
    if network.version == 4:
        step, end, digits = 8, "in-addr.arpa.", [str(byte) for byte in network.network_address.packed]
    else:
        step, end, digits = 4, "ip6.arpa.", list(network.network_address.packed.hex())
    count = -(-network.prefixlen // step)
    if not count:
        return (end,)
    above = "".join(f"{label}." for label in reversed(digits[: count - 1])) + end
    first, base = (int(digits[count - 1]), "d") if step == 8 else (int(digits[count - 1], 16), "x")
    return tuple(f"{label:{base}}.{above}" for label in range(first, first + (1 << count * step - network.prefixlen)))


def parse_upstream(word: str) -> Upstream | None:
    """Parse the address of an upstream; None if it is no address. Raises ValueError if it is not supported."""
    transport, scheme, rest = word.rpartition("://")
    if scheme and transport not in ("dns", "tls"):
        raise ValueError(f"{quoted(transport)} is not supported; dns:// and tls:// are")
    host, port = rest, ""
    if bracketed := re.fullmatch(r"\[([^]]*)\](?::(.*))?", rest):
        host, port = bracketed[1], bracketed[2] or ""
    elif rest.count(":") == 1:
        host, _, port = rest.partition(":")
    try:
        server = address(host)
    except ValueError:
        if scheme:
            raise ValueError(f"{quoted(host)} is not an address") from None
        return None
    if port and not is_port(port):
        raise ValueError(f"{quoted(port)} is not a port (1-65535)")
    if transport == "tls":
        return Upstream(server, int(port or DEFAULT_TLS_PORT), "tls")
    return Upstream(server, int(port or DEFAULT_PORT))


def is_port(word: str) -> bool:
    """Return True for a number from 1 to 65535."""
    return bool(re.fullmatch(r"\d{1,5}", word, re.ASCII)) and 1 <= int(word) <= 65535
