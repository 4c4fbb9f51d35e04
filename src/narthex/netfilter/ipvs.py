"""Virtual servers of IPVS: values, and the text of `ipvsadm -S -n` and `ipvsadm -L -n`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

import msgspec

from narthex.model import Protocol, address_key, join_port, split_port
from narthex.model.lines import MAX_LINE
from narthex.netfilter.ast import Unprintable

ServerKey = tuple[str, Protocol, int]
"""Address, protocol, and port of a virtual server."""

_DEFAULT_PERSISTENCE = 360
"""Seconds that IPVS uses when persistence is enabled without a timeout."""
_WEIGHT_IGNORING_SCHEDULERS = frozenset(("rr", "lc", "dh"))


class RealServer(msgspec.Struct, frozen=True):
    """A server that receives connections of a virtual server."""

    address: str
    port: int
    weight: int = 1
    forward: str = "masquerade"
    """IPVS forwarding method: `masquerade` (the only one that Services use), `gateway`, `tunnel`, or `local`."""

    @property
    def sort_key(self) -> tuple[str, int]:
        """Address text, then port: the order of endpoints in a plan."""
        return self.address, self.port


class VirtualServer(msgspec.Struct, frozen=True, kw_only=True):
    """An address and port that IPVS serves, and its real servers."""

    address: str
    protocol: Protocol
    port: int
    scheduler: str
    """Name of the kernel module without `ip_vs_`: `rr`, `lc`, …"""
    persistence_seconds: int | None = None
    """Seconds for which a returning client keeps its real server; None schedules each connection anew."""
    hash_ports: bool = False
    """The hashing scheduler includes the client's port (`mh-port`, flag IP_VS_SVC_F_SCHED_MH_PORT)."""
    reals: tuple[RealServer, ...] = ()
    """Sorted by `RealServer.sort_key`."""

    @property
    def key(self) -> ServerKey:
        """The identity of the virtual server in the kernel."""
        return self.address, self.protocol, self.port

    @property
    def settings(self) -> tuple[str, int | None, bool]:
        """All properties other than the key and the real servers."""
        return self.scheduler, self.persistence_seconds, self.hash_ports

    def shares(self) -> tuple[tuple[RealServer, Fraction], ...]:
        """Return the real servers that can receive a connection, each with its share of the connections.

        A share holds over many connections: the next one depends on the scheduler's state or on the client's address.
        Schedulers that support weights distribute by weight. Weight 0 receives no connections.
        """
        usable = [real for real in self.reals if real.weight > 0]
        if self.scheduler in _WEIGHT_IGNORING_SCHEDULERS:
            return tuple((real, Fraction(1, len(usable))) for real in usable)
        total = sum(real.weight for real in usable)
        return tuple((real, Fraction(real.weight, total)) for real in usable)


def _with_reals(
    servers: Mapping[ServerKey, VirtualServer], reals: Mapping[ServerKey, list[RealServer]]
) -> Mapping[ServerKey, VirtualServer]:
    return {
        key: msgspec.structs.replace(server, reals=tuple(sorted(reals[key], key=lambda real: real.sort_key)))
        for key, server in servers.items()
    }


# ---- `ipvsadm -S -n` -----------------------------------------------------------------------------------------------

_MAX_TEXT = 256 << 20
_PROTOCOLS = {
    "-t": Protocol.TCP,
    "--tcp-service": Protocol.TCP,
    "-u": Protocol.UDP,
    "--udp-service": Protocol.UDP,
    "--sctp-service": Protocol.SCTP,
}
_PROTOCOL_OPTIONS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}
_FORWARDS = {
    "-m": "masquerade",
    "--masquerading": "masquerade",
    "-g": "gateway",
    "--gatewaying": "gateway",
    "-i": "tunnel",
    "--ipip": "tunnel",
}
_FORWARD_OPTIONS = {"masquerade": "-m", "gateway": "-g", "tunnel": "-i"}
_PORT_HASHING_FLAGS = ("sh-port", "mh-port", "flag-2")


class IpvsadmTextError(ValueError):
    """Text that is not the output of `ipvsadm -S -n`. The message contains the line number."""


class IpvsadmRules(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `ipvsadm -S -n`."""

    servers: Mapping[ServerKey, VirtualServer] = {}
    marks: frozenset[int] = frozenset()
    """Packet marks that have a virtual server (`-f`). Kubernetes uses none, and their real servers are not read."""


def ipvsadm_save_text(servers: Iterable[VirtualServer]) -> str:
    """Return the input of `ipvsadm -R` for these virtual servers, sorted. Raises Unprintable."""
    lines: list[str] = []
    for server in sorted(servers, key=lambda each: (address_key(each.address), each.protocol.value, each.port)):
        lines += _server_lines(server)
    return "".join(line + "\n" for line in lines)


def _server_lines(server: VirtualServer) -> Iterator[str]:
    if not server.scheduler.replace("_", "").isalnum() or not server.scheduler.isascii():
        raise Unprintable(f"{server.scheduler!r} is not a valid scheduler name")
    service = f"{_PROTOCOL_OPTIONS[server.protocol]} {join_port(server.address, server.port)}"
    line = f"-A {service} -s {server.scheduler}"
    if server.persistence_seconds is not None:
        line += f" -p {server.persistence_seconds}"
    if server.hash_ports:
        line += f" -b {server.scheduler}-port"
    yield line
    for real in server.reals:
        forward = _FORWARD_OPTIONS[real.forward]
        yield f"-a {service} -r {join_port(real.address, real.port)} {forward} -w {real.weight}"


def parse_ipvsadm(text: str) -> IpvsadmRules:
    """Parse the output of `ipvsadm -S -n`. Names instead of numbers are errors. Raises IpvsadmTextError."""
    if len(text) > _MAX_TEXT:
        raise IpvsadmTextError(f"the text has {len(text) >> 20} MiB; the limit is {_MAX_TEXT >> 20} MiB")
    servers: dict[ServerKey, VirtualServer] = {}
    reals: dict[ServerKey, list[RealServer]] = {}
    marks: set[int] = set()
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            if len(line) > MAX_LINE:
                raise ValueError(f"longer than {MAX_LINE} characters")
            verb, service, value, *rest = line.split()
            if verb not in ("-A", "-a"):
                raise ValueError("neither -A nor -a")
            if service in ("-f", "--fwmark-service"):
                marks.add(int(value))
                continue
            key = _key(service, value)
            if verb == "-A":
                servers[key] = _server(key, rest)
                reals.setdefault(key, [])
            elif key not in servers:
                raise ValueError(f"the virtual server {value} was not added before")
            else:
                reals[key].append(_real(rest, key))
        except ValueError as error:
            raise IpvsadmTextError(f"line {number}: {line[:120]!r}: {error}") from None
    return IpvsadmRules(servers=_with_reals(servers, reals), marks=frozenset(marks))


def _key(service: str, value: str) -> ServerKey:
    if service not in _PROTOCOLS:
        raise ValueError(f"{service} does not name the protocol of a virtual server")
    address, port = _endpoint(value)
    return address, _PROTOCOLS[service], port


def _endpoint(value: str) -> tuple[str, int]:
    """Return address and port. Port 0 means all ports of a persistent virtual server."""
    if value.endswith(":0"):
        return split_port(value[:-1] + "1")[0], 0
    return split_port(value)


def _server(key: ServerKey, words: list[str]) -> VirtualServer:
    options = _options(words)
    persistence = options.get("-p", options.get("--persistent"))
    flags = options.get("-b", options.get("--sched-flags", "")).split(",")
    address, protocol, port = key
    return VirtualServer(
        address=address,
        protocol=protocol,
        port=port,
        scheduler=options.get("-s", options.get("--scheduler", "wlc")),
        persistence_seconds=None if persistence is None else int(persistence or _DEFAULT_PERSISTENCE),
        hash_ports=any(flag in _PORT_HASHING_FLAGS for flag in flags),
    )


def _real(words: list[str], key: ServerKey) -> RealServer:
    options = _options(words)
    address, port = _endpoint(options.get("-r", options.get("--real-server", "")))
    forward = next((kind for word, kind in _FORWARDS.items() if word in options), "gateway")
    return RealServer(address, port or key[2], int(options.get("-w", options.get("--weight", "1"))), forward)


def _options(words: list[str]) -> dict[str, str]:
    """Return the options with their values, "" for an option without a value."""
    options: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("-"):
            name = word
            options[name] = ""
        elif name:
            options[name] = word
        else:
            raise ValueError(f"{word!r} belongs to no option")
    return options


# ---- `ipvsadm -L -n` -----------------------------------------------------------------------------------------------

_SERVER = re.compile(r"(TCP|UDP|SCTP|FWM)\s+(\S+)(?:\s+IPv6)?\s+(\w+)((?:\s+\S+)*)$")
_REAL = re.compile(r"->\s+(\S+:\d+)\s+(Masq|Route|Tunnel|Local)\s+(\d+)\b")
_HEADERS = ("IP Virtual Server version", "Prot LocalAddress:Port", "-> RemoteAddress:Port")
_LISTED_FORWARDS = {"Masq": "masquerade", "Route": "gateway", "Tunnel": "tunnel", "Local": "local"}
_SCHEDULERS = frozenset(("rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos"))


class IpvsadmListParser:
    """Parses the output of `ipvsadm -L -n` line by line."""

    def __init__(self) -> None:
        self._servers: dict[ServerKey, VirtualServer] = {}
        self._reals: dict[ServerKey, list[RealServer]] = {}
        self._again: dict[ServerKey, list[list[RealServer]]] = {}
        """The real servers of further listings, which show the same servers at another time or in part."""
        self._current: ServerKey | None = None
        self._into: list[RealServer] = []

    def feed(self, line: str) -> bool:
        """Parse a line. Return False if it is not part of a listing."""
        if line.startswith(_HEADERS):
            return True
        if len(line) > MAX_LINE:
            return False
        server = _SERVER.match(line)
        if server is not None and server[3] in _SCHEDULERS:
            self._add_server(server)
            return True
        real = _REAL.match(line)
        if real is None or self._current is None:
            return False
        try:
            address, port = split_port(real[1])
        except ValueError:
            return False
        self._into.append(RealServer(address, port, int(real[3]), _LISTED_FORWARDS[real[2]]))
        return True

    def _add_server(self, match: re.Match[str]) -> None:
        self._current = None
        try:
            address, port = split_port(match[2])
        except ValueError:
            # A name or a packet mark: no packet can be assigned to this virtual server.
            return
        flags = match[4].split()
        seconds = None
        if "persistent" in flags:
            at = flags.index("persistent") + 1
            seconds = int(flags[at]) if at < len(flags) and flags[at].isdigit() else _DEFAULT_PERSISTENCE
        key = address, Protocol(match[1]), port
        self._current, self._into = key, []
        if self._reals.get(key):
            self._again.setdefault(key, []).append(self._into)
            return
        self._servers[key] = VirtualServer(
            address=address,
            protocol=key[1],
            port=port,
            scheduler=match[3],
            persistence_seconds=seconds,
            hash_ports=any(flag.strip("()").endswith("-port") for flag in flags),
        )
        self._reals[key] = self._into

    def servers(self) -> Mapping[ServerKey, VirtualServer]:
        """Return the listed virtual servers by key, each with the real servers of the first listing that has some."""
        return _with_reals(self._servers, self._reals)

    def differing(self) -> Iterator[ServerKey]:
        """Yield the virtual servers that were listed again with other real servers."""
        for key, others in self._again.items():
            first = {(real.address, real.port, real.weight) for real in self._reals[key]}
            if any({(real.address, real.port, real.weight) for real in other} != first for other in others):
                yield key
