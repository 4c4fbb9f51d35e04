"""The iptables backends of ipMasq and of host ports: one iptables-restore per family and request."""

from __future__ import annotations

from narthex.cni import fields
from narthex.cni.errors import TAKEN, CniError
from narthex.cni.plugins import iptables as chains
from narthex.linux.failpoints import CNI_IPTABLES, failpoint
from narthex.linux.run import CommandError, run
from narthex.model.values import ip_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from narthex.cni.plugins.portmap import PortmapConfig, PortmapTarget
    from narthex.cni.request import CniRequest
    from narthex.cni.result import IPConfig

_PROGRAMS = {4: "iptables", 6: "ip6tables"}


def masquerade(request: CniRequest, ips: tuple[IPConfig, ...]) -> None:
    """Masquerade a pod. Raises CniError."""
    for family in _PROGRAMS:
        _load(family, chains.masquerade(request.network, request.container, ips, family))


def masquerades(request: CniRequest, ips: tuple[IPConfig, ...]) -> bool:
    """Return True if a pod's rules exist."""
    chain = chains.masquerade_chain(request.network, request.container)
    families = {ip_version(ip.network.address) for ip in ips}
    return all(chains.has_rule(chain, _listed(family)) for family in families)


def unmasquerade(network: str, container: str) -> None:
    """Remove a pod's rules, ours or those of the reference plugins, if any. Raises CniError."""
    _remove(chains.masquerade_chain(network, container))


def open_ports(request: CniRequest, config: PortmapConfig, pod: PortmapTarget) -> None:
    """Open host ports. Raises CniError if another pod has one of them."""
    own = chains.ports_chain(request.network, request.container)
    for ip in pod.ips:
        family = ip_version(ip)
        there = _listed(family)
        for port, chain in chains.holders(there, config, own):
            owner = chains.container_of(chain, there)
            raise CniError(TAKEN, f"host port {port} is taken by container {owner}")
        removal = chains.removal(own, there)
        _load(family, removal)
        _load(family, chains.ports(request.network, request.container, config, pod, family, there))


def has_ports(request: CniRequest, pod: PortmapTarget) -> bool:
    """Return True if a pod's rules exist."""
    chain = chains.ports_chain(request.network, request.container)
    return all(chains.has_rule(chain, _listed(ip_version(ip))) for ip in pod.ips)


def close_ports(network: str, container: str) -> None:
    """Remove a pod's rules, ours or those of the reference plugins, if any. Raises CniError."""
    _remove(chains.ports_chain(network, container))


def _remove(chain: str) -> None:
    for family in _PROGRAMS:
        try:
            _load(family, chains.removal(chain, _listed(family)))
        except FileNotFoundError:
            # Without iptables there are no iptables rules.
            continue


def _listed(family: int) -> str:
    return run([f"{_PROGRAMS[family]}-save", "-t", "nat"], timeout=30)


def _load(family: int, text: str) -> None:
    if not text:
        return
    try:
        run([f"{_PROGRAMS[family]}-restore", "--noflush", "--wait", "5"], stdin=text, timeout=30)
    except FileNotFoundError:
        raise fields.wrong("backend", f"{_PROGRAMS[family]}-restore is not installed") from None
    except CommandError as error:
        raise CniError(999, f"{_PROGRAMS[family]}: {error.said.strip()[:512]}") from None
    failpoint(CNI_IPTABLES)
