"""Results: what a plugin answers, in the words of every version of the specification."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.cni.request import VERSIONS
from narthex.model import packed_addresses as address
from narthex.model.values import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.fields import Fields
    from narthex.model.packed_addresses import Network

_WITH_FAMILY = ("0.3.0", "0.3.1", "0.4.0")
"""Versions in which an address says its family."""
_OLD = ("0.1.0", "0.2.0")
"""Versions with one address per family, and no interfaces."""
_ROUTE_NUMBERS = ("mtu", "advmss", "priority", "table", "scope")
_MOST_NUMBER = (1 << 32) - 1


class Interface(Value):
    """A network interface."""

    name: str
    mac: str = ""
    sandbox: str = ""
    """Path of the namespace it is in; empty for the node's own."""
    extra: tuple[tuple[str, object], ...] = ()
    """mtu, socketPath, pciID of 1.1.0."""


class IPConfig(Value):
    """An address of the pod."""

    network: Network
    gateway: bytes = b""
    interface: int | None = None
    """Place in the result's list of interfaces."""


class PodRoute(Value):
    """A route of the pod."""

    destination: Network
    gateway: bytes = b""
    numbers: tuple[tuple[str, int], ...] = ()
    """mtu, advmss, priority, table, scope of 1.1.0, those that are given."""


class DNSConfig(Value):
    """How the pod shall resolve names."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class CniResult(Value):
    """What is there for an attachment."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[IPConfig, ...] = ()
    routes: tuple[PodRoute, ...] = ()
    dns: DNSConfig = DNSConfig()


def write(result: CniResult, version: str) -> dict[str, object]:
    """The result as an object of a version."""
    said: dict[str, object] = {"cniVersion": version}
    if version in _OLD:
        for family in (4, 6):
            held = [ip for ip in result.ips if address.version(ip.network.address) == family]
            if held:
                routes = [_route(one) for one in result.routes if address.version(one.destination.address) == family]
                said[f"ip{family}"] = _without_empty(
                    {"ip": str(held[0].network), "gateway": _text(held[0].gateway), "routes": routes}
                )
    else:
        said |= _without_empty(
            {
                "interfaces": [_interface(one) for one in result.interfaces],
                "ips": [_ip(one, version) for one in result.ips],
                "routes": [_route(one) for one in result.routes],
            }
        )
    said["dns"] = write_dns(result.dns)
    return said


def write_dns(dns: DNSConfig) -> dict[str, object]:
    """The object for the names' resolution, without what is empty."""
    return _without_empty(
        {
            "nameservers": list(dns.nameservers),
            "domain": dns.domain,
            "search": list(dns.search),
            "options": list(dns.options),
        }
    )


def _interface(one: Interface) -> dict[str, object]:
    return _without_empty({"name": one.name, "mac": one.mac, "sandbox": one.sandbox}) | dict(one.extra)


def _ip(one: IPConfig, version: str) -> dict[str, object]:
    said: dict[str, object] = {}
    if version in _WITH_FAMILY:
        said["version"] = str(address.version(one.network.address))
    if one.interface is not None:
        said["interface"] = one.interface
    said["address"] = str(one.network)
    if one.gateway:
        said["gateway"] = address.text(one.gateway)
    return said


def _route(one: PodRoute) -> dict[str, object]:
    return _without_empty({"dst": str(one.destination), "gw": _text(one.gateway)}) | dict(one.numbers)


def _text(data: bytes) -> str:
    return address.text(data) if data else ""


def _without_empty(said: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in said.items() if value not in ("", [])}


def previous(config: Mapping[str, object]) -> CniResult | None:
    """The result of the plugins before in the chain; None when there is none. Raises CniError."""
    if config.get("prevResult") is None:
        return None
    return read(fields.part(config, "prevResult"), "prevResult.")


def read(said: Fields, place: str) -> CniResult:
    """Read a result of any version. Raises CniError with the place."""
    version = fields.text(said, "cniVersion", place)
    if version and version not in VERSIONS:
        raise CniError(INVALID_CONFIG, f"{place}cniVersion: {version[:32]!r} is not a version of the specification")
    if "ip4" in said or "ip6" in said:
        ips, routes = _read_old(said, place)
        return CniResult((), tuple(ips), tuple(routes), read_dns(said, place))
    interfaces = tuple(
        _read_interface(one, f"{place}interfaces[{number}].")
        for number, one in enumerate(fields.objects(said, "interfaces", place))
    )
    return CniResult(
        interfaces,
        tuple(
            _read_ip(one, f"{place}ips[{number}].", len(interfaces))
            for number, one in enumerate(fields.objects(said, "ips", place))
        ),
        read_routes(said, place),
        read_dns(said, place),
    )


def _read_old(said: Fields, place: str) -> tuple[list[IPConfig], list[PodRoute]]:
    ips: list[IPConfig] = []
    routes: list[PodRoute] = []
    for name in ("ip4", "ip6"):
        one = fields.part(said, name, place)
        if one:
            here = f"{place}{name}."
            ips.append(
                IPConfig(fields.network(fields.text(one, "ip", here), here + "ip"), _gateway(one, "gateway", here))
            )
            routes += read_routes(one, here)
    return ips, routes


def _read_interface(one: Fields, place: str) -> Interface:
    name, mac, sandbox = (fields.text(one, name, place) for name in ("name", "mac", "sandbox"))
    extra = tuple((name, value) for name, value in one.items() if name in ("mtu", "socketPath", "pciID"))
    return Interface(name, mac, sandbox, extra)


def _read_ip(one: Fields, place: str, interfaces: int) -> IPConfig:
    interface = fields.whole(one, "interface", 0, _MOST_NUMBER, place)
    if interface is not None and interface >= interfaces:
        raise fields.wrong(place + "interface", f"there are only {interfaces} interfaces")
    network = fields.network(fields.text(one, "address", place), place + "address")
    return IPConfig(network, _gateway(one, "gateway", place), interface)


def read_routes(said: Fields, place: str) -> tuple[PodRoute, ...]:
    """The routes of a result, or of an IPAM configuration. Raises CniError."""
    routes = []
    for number, one in enumerate(fields.objects(said, "routes", place)):
        here = f"{place}routes[{number}]."
        destination = fields.network(fields.text(one, "dst", here), here + "dst")
        numbers = []
        for name in _ROUTE_NUMBERS:
            value = fields.whole(one, name, 0, _MOST_NUMBER, here)
            if value is not None:
                numbers.append((name, value))
        routes.append(PodRoute(destination, _gateway(one, "gw", here), tuple(numbers)))
    return tuple(routes)


def read_dns(said: Fields, place: str = "") -> DNSConfig:
    """The `dns` of a result or a configuration. Raises CniError."""
    one = fields.part(said, "dns", place)
    here = f"{place}dns."
    return DNSConfig(
        fields.texts(one, "nameservers", here),
        fields.text(one, "domain", here),
        fields.texts(one, "search", here),
        fields.texts(one, "options", here),
    )


def _gateway(one: Fields, name: str, place: str) -> bytes:
    value = fields.text(one, name, place)
    return fields.ip(value, place + name) if value else b""
