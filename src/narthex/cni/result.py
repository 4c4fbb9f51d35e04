"""Results of plugins, in the format of every version of the specification."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import INVALID_CONFIG, CniError
from narthex.cni.request import VERSIONS
from narthex.model.values import Value, address_text, ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from narthex.cni.fields import Fields
    from narthex.model.values import Network

_WITH_FAMILY = ("0.3.0", "0.3.1", "0.4.0")
"""Versions in which an address states its family."""
_OLD = ("0.1.0", "0.2.0")
"""Versions with one address per family and no interfaces."""
_ROUTE_NUMBERS = ("mtu", "advmss", "priority", "table", "scope")
_MOST_NUMBER = (1 << 32) - 1


class Interface(Value):
    """A network interface."""

    name: str
    mac: str = ""
    sandbox: str = ""
    """Path of its namespace; empty for interfaces of the node."""
    extra: tuple[tuple[str, object], ...] = ()
    """mtu, socketPath, and pciID of version 1.1.0."""


class IPConfig(Value):
    """An address of the pod."""

    network: Network
    gateway: bytes = b""
    interface: int | None = None
    """Index in the result's list of interfaces."""


class PodRoute(Value):
    """A route of the pod."""

    destination: Network
    gateway: bytes = b""
    numbers: tuple[tuple[str, int], ...] = ()
    """The attributes mtu, advmss, priority, table, and scope of version 1.1.0 that are set."""


class DNSConfig(Value):
    """DNS configuration of the pod."""

    nameservers: tuple[str, ...] = ()
    domain: str = ""
    search: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


class CniResult(Value):
    """The result of an ADD."""

    interfaces: tuple[Interface, ...] = ()
    ips: tuple[IPConfig, ...] = ()
    routes: tuple[PodRoute, ...] = ()
    dns: DNSConfig = DNSConfig()


def write(result: CniResult, version: str) -> dict[str, object]:
    """Return the result as an object of a specification version."""
    data: dict[str, object] = {"cniVersion": version}
    if version in _OLD:
        for family in (4, 6):
            held = [ip for ip in result.ips if ip_version(ip.network.address) == family]
            if held:
                routes = [_route(one) for one in result.routes if ip_version(one.destination.address) == family]
                data[f"ip{family}"] = _without_empty(
                    {"ip": str(held[0].network), "gateway": _text(held[0].gateway), "routes": routes}
                )
    else:
        data |= _without_empty(
            {
                "interfaces": [_interface(one) for one in result.interfaces],
                "ips": [_ip(one, version) for one in result.ips],
                "routes": [_route(one) for one in result.routes],
            }
        )
    data["dns"] = write_dns(result.dns)
    return data


def write_dns(dns: DNSConfig) -> dict[str, object]:
    """Return the DNS configuration as an object, without empty fields."""
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
    data: dict[str, object] = {}
    if version in _WITH_FAMILY:
        data["version"] = str(ip_version(one.network.address))
    if one.interface is not None:
        data["interface"] = one.interface
    data["address"] = str(one.network)
    if one.gateway:
        data["gateway"] = address_text(one.gateway)
    return data


def _route(one: PodRoute) -> dict[str, object]:
    return _without_empty({"dst": str(one.destination), "gw": _text(one.gateway)}) | dict(one.numbers)


def _text(data: bytes) -> str:
    return address_text(data) if data else ""


def _without_empty(data: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in data.items() if value not in ("", [])}


def previous(config: Mapping[str, object]) -> CniResult | None:
    """Return the result of the previous plugins in the chain, or None. Raises CniError."""
    if config.get("prevResult") is None:
        return None
    return read(fields.part(config, "prevResult"), "prevResult.")


def read(data: Fields, path: str) -> CniResult:
    """Parse a result of any version. Raises CniError with the field's path."""
    version = fields.text(data, "cniVersion", path)
    if version and version not in VERSIONS:
        raise CniError(INVALID_CONFIG, f"{path}cniVersion: {version[:32]!r} is not a version of the specification")
    if "ip4" in data or "ip6" in data:
        ips, routes = _read_old(data, path)
        return CniResult((), tuple(ips), tuple(routes), read_dns(data, path))
    interfaces = tuple(
        _read_interface(one, f"{path}interfaces[{number}].")
        for number, one in enumerate(fields.objects(data, "interfaces", path))
    )
    return CniResult(
        interfaces,
        tuple(
            _read_ip(one, f"{path}ips[{number}].", len(interfaces))
            for number, one in enumerate(fields.objects(data, "ips", path))
        ),
        read_routes(data, path),
        read_dns(data, path),
    )


def _read_old(data: Fields, path: str) -> tuple[list[IPConfig], list[PodRoute]]:
    ips: list[IPConfig] = []
    routes: list[PodRoute] = []
    for name in ("ip4", "ip6"):
        one = fields.part(data, name, path)
        if one:
            here = f"{path}{name}."
            ips.append(
                IPConfig(
                    fields.network(fields.text(one, "ip", here), here + "ip"), fields.optional_ip(one, "gateway", here)
                )
            )
            routes += read_routes(one, here)
    return ips, routes


def _read_interface(one: Fields, path: str) -> Interface:
    name, mac, sandbox = (fields.text(one, name, path) for name in ("name", "mac", "sandbox"))
    extra = tuple((name, value) for name, value in one.items() if name in ("mtu", "socketPath", "pciID"))
    return Interface(name, mac, sandbox, extra)


def _read_ip(one: Fields, path: str, interfaces: int) -> IPConfig:
    interface = fields.whole(one, "interface", 0, _MOST_NUMBER, path)
    if interface is not None and interface >= interfaces:
        raise fields.wrong(path + "interface", f"there are only {interfaces} interfaces")
    network = fields.network(fields.text(one, "address", path), path + "address")
    return IPConfig(network, fields.optional_ip(one, "gateway", path), interface)


def read_routes(data: Fields, path: str) -> tuple[PodRoute, ...]:
    """Parse the routes of a result or of an IPAM configuration. Raises CniError."""
    routes = []
    for number, one in enumerate(fields.objects(data, "routes", path)):
        here = f"{path}routes[{number}]."
        destination = fields.network(fields.text(one, "dst", here), here + "dst")
        numbers = []
        for name in _ROUTE_NUMBERS:
            value = fields.whole(one, name, 0, _MOST_NUMBER, here)
            if value is not None:
                numbers.append((name, value))
        routes.append(PodRoute(destination, fields.optional_ip(one, "gw", here), tuple(numbers)))
    return tuple(routes)


def read_dns(data: Fields, path: str = "") -> DNSConfig:
    """Parse the `dns` of a result or a configuration. Raises CniError."""
    one = fields.part(data, "dns", path)
    here = f"{path}dns."
    return DNSConfig(
        fields.texts(one, "nameservers", here),
        fields.text(one, "domain", here),
        fields.texts(one, "search", here),
        fields.texts(one, "options", here),
    )
