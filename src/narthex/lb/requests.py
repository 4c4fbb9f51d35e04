"""Address requests of Services (rows M4, M5, M8, M10)."""

from __future__ import annotations

import msgspec

from narthex.lb.service_status import ADDRESS_POOL, LOAD_BALANCER_IPS, PREFIX, Refusal, annotation
from narthex.model import IPFamily, Service, family_of, quoted
from narthex.model.validate import host_address

_REQUIRED = "RequireDualStack"


class AddressRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The validated address request of one Service."""

    families: tuple[IPFamily, ...]
    """IP families that need an address, the primary one first."""
    all_families: bool
    """True if an address of every family is required."""
    addresses: tuple[str, ...] = ()
    pool: str = ""


def address_request(service: Service) -> AddressRequest | Refusal:
    """Return the request of a Service, or why it is invalid."""
    families = service.ip_families or tuple(family_of(ip) for ip in service.cluster_ips if ip != "None")
    if not families:
        return Refusal(
            "it has no cluster IP yet, so its IP families are unknown", "wait for the API server to give one"
        )
    addresses = _addresses(service)
    if isinstance(addresses, Refusal):
        return addresses
    required = service.ip_family_policy == _REQUIRED
    for address in addresses:
        if family_of(address) not in families:
            has = " and ".join(family.label for family in families)
            text = f"it asks for {address}, but its IP families are {has}"
            return Refusal(text, "ask for an address of its family, or change spec.ipFamilies")
    if len({family_of(address) for address in addresses}) != len(addresses):
        return Refusal(f"it asks for {' and '.join(addresses)}", "ask for at most one address of each IP family")
    if required and addresses and len(addresses) < len(families):
        text = f"it asks for {addresses[0]} alone, but its ipFamilyPolicy is {_REQUIRED}"
        return Refusal(text, "ask for an address of each IP family")
    return AddressRequest(
        families=tuple(family_of(address) for address in addresses) or families,
        all_families=required,
        addresses=addresses,
        pool=annotation(service, ADDRESS_POOL),
    )


def _addresses(service: Service) -> tuple[str, ...] | Refusal:
    annotated, name = annotation(service, LOAD_BALANCER_IPS), PREFIX + LOAD_BALANCER_IPS
    if annotated and service.load_balancer_ip:
        return Refusal(f"both annotation {name} and spec.loadBalancerIP are set", "keep one of them")
    if not annotated:
        return (service.load_balancer_ip,) if service.load_balancer_ip else ()
    found = []
    for part in annotated.split(","):
        try:
            found.append(host_address(part.strip()))
        except ValueError as error:
            text = f"annotation {name}: {quoted(part.strip())} {error}"
            return Refusal(text, "write one address, or one of each IP family joined by a comma")
    return tuple(dict.fromkeys(found))
