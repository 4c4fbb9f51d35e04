"""Virtual servers in the text form of `ipvsadm -S -n`, which `ipvsadm -R` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from narthex.model.net import Protocol, address_key, join_port, split_port
from narthex.netfilter.ast.nodes import Unprintable
from narthex.netfilter.ipvs.servers import RealServer, ServerKey, VirtualServer

_MAX_TEXT = 256 << 20
_PROTOCOLS = {
    "-t": Protocol.TCP,
    "--tcp-service": Protocol.TCP,
    "-u": Protocol.UDP,
    "--udp-service": Protocol.UDP,
    "--sctp-service": Protocol.SCTP,
}
_WORDS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}
_FORWARDS = {
    "-m": "masquerade",
    "--masquerading": "masquerade",
    "-g": "gateway",
    "--gatewaying": "gateway",
    "-i": "tunnel",
    "--ipip": "tunnel",
}
_FORWARD_WORDS = {"masquerade": "-m", "gateway": "-g", "tunnel": "-i"}
_HASHED_WITH_PORTS = ("sh-port", "mh-port", "flag-2")


class IpvsadmTextError(ValueError):
    """The text is not what `ipvsadm -S -n` prints; the message says in which line."""


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What a dump holds."""

    servers: Mapping[ServerKey, VirtualServer] = {}
    marks: frozenset[int] = frozenset()
    """Packet marks that have a virtual server (`-f`): not Kubernetes', and what becomes of such packets is not read."""


def save_text(servers: Iterable[VirtualServer]) -> str:
    """The virtual servers as `ipvsadm -R` reads them, sorted. Raises Unprintable."""
    lines: list[str] = []
    for server in sorted(servers, key=lambda each: (address_key(each.address), each.protocol.value, each.port)):
        lines += _server_lines(server)
    return "".join(line + "\n" for line in lines)


def _server_lines(server: VirtualServer) -> Iterator[str]:
    if not server.scheduler.replace("_", "").isalnum() or not server.scheduler.isascii():
        raise Unprintable(f"{server.scheduler!r} is not a scheduler's name")
    where = f"{_WORDS[server.protocol]} {join_port(server.address, server.port)}"
    words = f"-A {where} -s {server.scheduler}"
    if server.persistence_seconds is not None:
        words += f" -p {server.persistence_seconds}"
    if server.hash_ports:
        words += f" -b {server.scheduler}-port"
    yield words
    for real in server.reals:
        how = _FORWARD_WORDS[real.forward]
        yield f"-a {where} -r {join_port(real.address, real.port)} {how} -w {real.weight}"


def parse(text: str) -> Dump:
    """The virtual servers of a dump, with numbers and not names (`-n`). Raises IpvsadmTextError."""
    if len(text) > _MAX_TEXT:
        raise IpvsadmTextError(f"{len(text) >> 20} MiB are more than the {_MAX_TEXT >> 20} MiB that are read")
    servers: dict[ServerKey, VirtualServer] = {}
    reals: dict[ServerKey, list[RealServer]] = {}
    marks: set[int] = set()
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        try:
            verb, where, value, *rest = line.split()
            if verb not in ("-A", "-a"):
                raise ValueError("neither -A nor -a")
            if where in ("-f", "--fwmark-service"):
                marks.add(int(value))
                continue
            key = _key(where, value)
            if verb == "-A":
                servers[key] = _server(key, rest)
                reals.setdefault(key, [])
            elif key not in servers:
                raise ValueError(f"the virtual server {value} was not added before")
            else:
                reals[key].append(_real(rest, key))
        except ValueError as error:
            raise IpvsadmTextError(f"line {number}: {line[:120]!r}: {error}") from None
    return Dump(
        servers={
            key: msgspec.structs.replace(server, reals=tuple(sorted(reals[key], key=lambda real: real.sort_key)))
            for key, server in servers.items()
        },
        marks=frozenset(marks),
    )


def _key(where: str, value: str) -> ServerKey:
    if where not in _PROTOCOLS:
        raise ValueError(f"{where} is no protocol of a virtual server")
    address, port = _place(value)
    return address, _PROTOCOLS[where], port


def _place(value: str) -> tuple[str, int]:
    """Address and port; port 0 stands for all ports of a persistent virtual server."""
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
        persistence_seconds=None if persistence is None else int(persistence or 360),
        hash_ports=any(flag in _HASHED_WITH_PORTS for flag in flags),
    )


def _real(words: list[str], key: ServerKey) -> RealServer:
    options = _options(words)
    where = options.get("-r", options.get("--real-server", ""))
    address, port = _place(where)
    forward = next((kind for word, kind in _FORWARDS.items() if word in options), "gateway")
    return RealServer(address, port or key[2], int(options.get("-w", options.get("--weight", "1"))), forward)


def _options(words: list[str]) -> dict[str, str]:
    """Options with their value; "" for one that has none."""
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
