"""The plugin `portmap`: host ports that lead to pods. Its configuration, and the nftables set elements.

With the nftables backend the rules are constant and a mapping consists of map elements, so the cost of an ADD is independent
of the number of pods. The key of a mapping is unique: a second pod is rejected.
"""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import UNSUPPORTED_FIELD, CniError
from narthex.cni.plan import SetElement
from narthex.model.values import Value, address_text, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.request import CniRequest
    from narthex.cni.result import CniResult

TABLE = "narthex-hostport"
GUARD = "links"
"""Set of the links that `guard` is about."""
PROTOCOLS = {"tcp": 6, "udp": 17, "sctp": 132}
_MASK_BITS = 31
_DEFAULT_MASQ_BIT = 13


class PortMapping(Value):
    """One host port and its target port."""

    protocol: str
    host_port: int
    port: int
    host_ip: bytes = b""
    """Empty: all addresses of the node."""

    def __str__(self) -> str:
        where = f"{address_text(self.host_ip)} " if self.host_ip else ""
        return f"{where}{self.protocol} {self.host_port}"


class PortmapConfig(Value):
    """Configuration of `portmap`."""

    mappings: tuple[PortMapping, ...]
    snat: bool
    """Masquerade traffic whose replies would bypass the node: from loopback, and from the pod itself."""
    masquerade_all: bool
    backend: str
    conditions: tuple[tuple[str, ...], tuple[str, ...]]
    """Additional matches for IPv4 and IPv6, in iptables syntax."""
    masq_bit: int
    set_mark_chain: str
    """An external chain that marks packets for masquerading; empty: ours."""


class PortmapTarget(Value):
    """The pod that the mappings lead to."""

    ips: tuple[bytes, ...]
    """At most one for each family."""
    subnets: tuple[str, ...]
    """Networks of `ips`, as CIDRs."""
    links: tuple[str, ...]
    """The node's interfaces to the pod."""


def read(request: CniRequest) -> PortmapConfig:
    """Parse the configuration. Raises CniError with the field."""
    config = request.config
    conditions = fields.texts(config, "conditionsV4"), fields.texts(config, "conditionsV6")
    bit = fields.whole(config, "markMasqBit", 0, _MASK_BITS)
    chain = fields.text(config, "externalSetMarkChain")
    if bit is not None and chain:
        raise fields.wrong("markMasqBit", "cannot specify externalSetMarkChain and markMasqBit")
    if chain and not _is_chain(chain):
        raise fields.wrong("externalSetMarkChain", "is not a chain's name: letters, digits, '-' and '_', 28 at most")
    backend = fields.text(config, "backend") or ("iptables" if chain or any(conditions) else "nftables")
    if backend not in ("nftables", "iptables"):
        raise fields.wrong("backend", f"{backend[:32]!r} is neither nftables nor iptables")
    if backend == "nftables" and (chain or any(conditions)):
        message = "conditionsV4, conditionsV6 and externalSetMarkChain are for the iptables backend"
        raise CniError(UNSUPPORTED_FIELD, message, "leave backend out, or set it to iptables")
    for name, words in zip(("conditionsV4", "conditionsV6"), conditions, strict=True):
        _check_condition(name, words)
    return PortmapConfig(
        _mappings(request),
        fields.flag(config, "snat", default=True),
        fields.flag(config, "masqAll"),
        backend,
        conditions,
        _DEFAULT_MASQ_BIT if bit is None else bit,
        chain,
    )


def _is_chain(name: str) -> bool:
    return len(name) <= 28 and name.isascii() and name.replace("-", "").replace("_", "").isalnum()


def _check_condition(name: str, words: tuple[str, ...]) -> None:
    """Reject words that could end a quote, a line, or the match in the input of iptables-restore."""
    for word in words:
        if not word or not word.isprintable() or not word.isascii() or any(mark in word for mark in "\"'\\"):
            raise fields.wrong(name, f"{word[:32]!r} cannot be a part of a rule")
        if word in ("-j", "-g", "--jump", "--goto", "-t", "--table") or word[:2] == "-A":
            raise fields.wrong(name, f"{word!r} is no match")


def _mappings(request: CniRequest) -> tuple[PortMapping, ...]:
    runtime = fields.part(request.config, "runtimeConfig")
    found = []
    for number, one in enumerate(fields.objects(runtime, "portMappings", "runtimeConfig.")):
        path = f"runtimeConfig.portMappings[{number}]."
        ports = []
        for name in ("hostPort", "containerPort"):
            port = fields.whole(one, name, 1, 65535, path)
            if port is None:
                raise fields.wrong(path + name, "must be a port, from 1 to 65535")
            ports.append(port)
        protocol = (fields.text(one, "protocol", path) or "tcp").lower()
        if protocol not in PROTOCOLS:
            raise fields.wrong(path + "protocol", f"{protocol[:16]!r} is not one of {', '.join(PROTOCOLS)}")
        found.append(PortMapping(protocol, ports[0], ports[1], fields.optional_ip(one, "hostIP", path)))
    return tuple(dict.fromkeys(found))


def portmap_target(result: CniResult) -> PortmapTarget:
    """Return the target of a result: the first address of each family, and the node's interfaces to it."""
    ips: dict[int, bytes] = {}
    subnets: dict[int, str] = {}
    for ip in result.ips:
        inside = ip.interface is None or bool(result.interfaces[ip.interface].sandbox)
        size = len(ip.network.address)
        if inside and size not in ips:
            ips[size] = ip.network.address
            subnets[size] = f"{address_text(ip.network.first)}/{ip.network.prefix}"
    # The first one is the route's interface: a bridge precedes its port.
    links = tuple(one.name for one in result.interfaces if not one.sandbox and one.name)[:1]
    return PortmapTarget(tuple(ips.values()), tuple(subnets.values()), links)


def elements(config: PortmapConfig, pod: PortmapTarget) -> tuple[SetElement, ...]:
    """Return the set elements of a pod. A mapping for an address of a family that the pod lacks has none."""
    every = (one for mapping in config.mappings for ip in pod.ips for one in _elements(config, pod, mapping, ip))
    # Two host ports may map to the same port of the pod.
    return tuple(dict.fromkeys(every))


def applies(mapping: PortMapping, ip: bytes) -> bool:
    """Return True if a mapping applies to an address; a mapping of an unspecified address applies to its family."""
    return not mapping.host_ip or len(mapping.host_ip) == len(ip)


def loopback_links(config: PortmapConfig, pod: PortmapTarget) -> tuple[str, ...]:
    """Return the links on which loopback traffic to the pod must be allowed (`route_localnet`)."""
    ipv4 = any(len(ip) == 4 and any(applies(one, ip) for one in config.mappings) for ip in pod.ips)
    return pod.links if ipv4 and config.snat else ()


def guard(links: tuple[str, ...]) -> tuple[SetElement, ...]:
    """Return the elements that block loopback destinations from these links. They stay as long as the links exist."""
    return tuple(SetElement(GUARD, _name(link)) for link in links)


def _elements(config: PortmapConfig, pod: PortmapTarget, mapping: PortMapping, ip: bytes) -> list[SetElement]:
    if not applies(mapping, ip):
        return []
    family = ip_version(ip)
    protocol, host_port = bytes((PROTOCOLS[mapping.protocol], 0, 0, 0)), _port(mapping.host_port)
    aim = ip + _port(mapping.port)
    kind, bound = ("bound", mapping.host_ip) if any(mapping.host_ip) else ("ports", b"")
    held = [SetElement(f"{kind}{family}", bound + protocol + host_port, aim, exclusive=True)]
    connection = ip + protocol + _port(mapping.port)
    if config.masquerade_all:
        held.append(SetElement(f"all{family}", connection))
    elif config.snat:
        if family == 4:
            held.append(SetElement("loopback4", connection))
        # In and out through the same link, as the node routes it: the reply would bypass the node.
        held += [SetElement(f"hairpin{family}", _name(link) + _name(link) + connection) for link in pod.links]
        # With br_netfilter, such a packet is bridged and has no incoming interface, and the reply passes the node's rules,
        # unless the pod itself has sent it: that one never leaves the pod.
        held.append(SetElement(f"self{family}", ip + connection))
    return held


def _port(number: int) -> bytes:
    return number.to_bytes(2, "big") + b"\0\0"


def _name(link: str) -> bytes:
    return link.encode().ljust(16, b"\0")


def frame() -> str:
    """Return the table without elements, in nft syntax.

    Its chains follow those of a Service proxy (dstnat, -100), so that Service ports take precedence. nft 1.0.6 accepts rules
    with a map only in the transaction that declares the map.
    """
    sets = "".join(_SETS.format(v=v, ip=ip) for v, ip in ((4, "ip"), (6, "ip6")))
    return f"table inet {TABLE} {{\n{sets}{_LOOPBACK_SETS}{_CHAINS}}}\n"


_SETS = """\
\tmap ports{v} {{ typeof meta l4proto . th dport : {ip} daddr . th dport; }}
\tmap bound{v} {{ typeof {ip} daddr . meta l4proto . th dport : {ip} daddr . th dport; }}
\tset hairpin{v} {{ typeof iifname . oifname . {ip} daddr . meta l4proto . th dport; }}
\tset self{v} {{ typeof {ip} saddr . {ip} daddr . meta l4proto . th dport; }}
\tset all{v} {{ typeof {ip} daddr . meta l4proto . th dport; }}
"""
_LOOPBACK_SETS = """\
\tset loopback4 { typeof ip daddr . meta l4proto . th dport; }
\tset links { typeof iifname; }
"""
_CONNECTION = "{ip} daddr . meta l4proto . th dport"
_BOTH = ((4, "ip", "ipv4"), (6, "ip6", "ipv6"))
_SEND = "".join(
    f"\t\tmeta nfproto {name} dnat {ip} to {key} map @{kind}{v}\n"
    for v, ip, name in _BOTH
    for kind, key in (("bound", f"{ip} daddr . meta l4proto . th dport"), ("ports", "meta l4proto . th dport"))
)
_ALL = "".join(f"\t\tmeta nfproto {name} {_CONNECTION.format(ip=ip)} @all{v} masquerade\n" for v, ip, name in _BOTH)
_HAIRPIN = "".join(
    f"\t\tmeta nfproto {name} {key} . {_CONNECTION.format(ip=ip)} @{kind}{v} masquerade\n"
    for v, ip, name in _BOTH
    for kind, key in (("hairpin", "iifname . oifname"), ("self", f"{ip} saddr"))
)
_CHAINS = f"""\
\tchain prerouting {{
\t\ttype nat hook prerouting priority -95;
\t\tfib daddr type local goto send
\t}}
\tchain output {{
\t\ttype nat hook output priority -95;
\t\tfib daddr type local goto send
\t}}
\tchain send {{
{_SEND}\t}}
\tchain postrouting {{
\t\ttype nat hook postrouting priority srcnat + 5;
\t\tct status dnat goto masquerade-answers
\t}}
\tchain masquerade-answers {{
\t\tip saddr 127.0.0.0/8 {_CONNECTION.format(ip="ip")} @loopback4 masquerade
{_ALL}\t\tfib saddr type local return
{_HAIRPIN}\t}}
\tchain guard {{
\t\ttype filter hook prerouting priority raw;
\t\tiifname @links ip daddr 127.0.0.0/8 drop
\t}}
"""
