"""The ipvs Target: virtual servers by netlink, addresses on kube-ipvs0, sets, and a few fixed iptables rules."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from immutables import Map

from narthex.linux.failpoints import (
    IPVS_BOUND,
    IPVS_DESTROYED,
    IPVS_ENTRIES,
    IPVS_SERVERS,
    IPVS_SETS,
    IPVS_TABLES,
    failpoint,
)
from narthex.model import IPFamily, in_any
from narthex.model.kernel_setting import KernelSetting
from narthex.proxy.backends.base import Target
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.ipvs import names
from narthex.proxy.backends.ipvs import rules as ipvs_rules
from narthex.proxy.backends.ipvs.rules import IpvsChanges, IpvsRules
from narthex.proxy.backends.leftovers import is_virtual_server
from narthex.proxy.kernel import ipvs_link
from narthex.proxy.kernel.ipset import destroy_ipsets, read_ipsets, write_ipsets
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.kernel.virtual_servers import TEND_SECONDS, IpvsServers


class IpvsTarget(Target[IpvsRules, IpvsChanges]):
    """Writes all objects of one namespace and family.

    Virtual servers are ours if their address is on kube-ipvs0 or our sets name them, and their address is not in
    `excluded` (row 24.10). Others are neither read nor touched.
    """

    def __init__(
        self,
        family: IPFamily,
        namespace: str | None = None,
        excluded: tuple[str, ...] = (),
        patience: float = TEND_SECONDS,
    ) -> None:
        """Create the Target; `patience` is the interval in seconds of the check of draining real servers."""
        self._family = family
        self._namespace = namespace
        self._excluded = excluded
        self._tables = IptablesTarget(family, namespace, owner=names.IPVS_CHAINS)
        self._servers = IpvsServers(family, namespace, patience)
        self._kinds = {names.set_name(name, family): kind for name, kind in names.KINDS.items()}

    def read(self) -> IpvsRules | None:
        """Return our objects in the kernel. Raises ApplyError if they cannot be read."""
        tables, held = self._tables.read(), self._read_rest()
        if tables is None and held is None:
            return None
        nothing = XtablesRules(self._family, {}, Map())
        held = held or IpvsRules(self._family, Map(), frozenset(), {}, nothing)
        if tables is None or any(each.kind != self._kinds[name] for name, each in held.sets.items()):
            # A set of another kind can only be made anew, and so must the rules that name it be.
            tables = nothing
        return IpvsRules(self._family, held.servers, held.bound, held.sets, tables)

    def _read_rest(self) -> IpvsRules | None:
        """Return everything except the iptables part."""
        sets = read_ipsets(self._kinds.__contains__, self._namespace)
        bound = ipvs_link.addresses(self._family, self._namespace)
        servers = self._servers.read(
            lambda key: not in_any(self._excluded, key[0]) and is_virtual_server(key, bound, sets)
        )
        if not sets and not bound and not servers:
            return None
        return IpvsRules(self._family, Map(servers), bound, sets, XtablesRules(self._family, {}, Map()))

    def apply(self, changes: IpvsChanges) -> None:
        """Make the changes. Raises ApplyError.

        Sets and rules for a virtual server are written before it and removed after it. An address is removed last,
        because it identifies a virtual server as ours.
        """
        if changes.replace:
            changes = self._differences(changes)
        namespace = self._namespace
        ipvs_link.bind(changes.bind, namespace)
        failpoint(IPVS_BOUND)
        remade = sorted({each.name for each in changes.sets_added}.intersection(changes.sets_removed))
        if remade:
            self._tables.clean()
            destroy_ipsets(remade, namespace)
        write_ipsets(changes.sets_added, {name: each.added for name, each in changes.entries.items()}, {}, namespace)
        failpoint(IPVS_SETS)
        if changes.tables:
            self._tables.apply(changes.tables)
        failpoint(IPVS_TABLES)
        self._servers.change(changes.servers_added, changes.servers_edited, changes.servers_removed, changes.reals)
        failpoint(IPVS_SERVERS)
        write_ipsets((), {}, {name: each.removed for name, each in changes.entries.items()}, namespace)
        failpoint(IPVS_ENTRIES)
        destroy_ipsets([name for name in changes.sets_removed if name not in remade], namespace)
        failpoint(IPVS_DESTROYED)
        ipvs_link.unbind(changes.unbind, namespace)

    def tend(self) -> float | None:
        """Remove draining real servers without connections (row 24.8).

        Returns the seconds until the next call, None if none is draining.
        """
        return self._servers.tend()

    def clean(self) -> None:
        """Remove everything that is ours. Raises ApplyError."""
        held = self._read_rest()
        bound = held.bound if held is not None else frozenset()
        self._tables.clean()
        if held is not None:
            self._servers.change(removed=list(held.servers))
            destroy_ipsets(sorted(held.sets), self._namespace)
        if ipvs_link.addresses(None, self._namespace) - bound:
            # The other family's are there as well.
            ipvs_link.unbind(bound, self._namespace)
        else:
            ipvs_link.remove(self._namespace)

    def _differences(self, changes: IpvsChanges) -> IpvsChanges:
        """Reduce a replacement to real differences, so that correct objects are left alone."""
        found = self._read_rest()
        if found is None:
            return msgspec.structs.replace(changes, replace=False)
        want = ipvs_rules.patch(found, changes)
        return msgspec.structs.replace(ipvs_rules.diff(found, want), tables=changes.tables)


_IPVS = "net/ipv4/vs/"
_REUSE_MATTERS = (4, 1), (5, 9)
"""From the first of these kernels until before the second, IPVS delayed a connection from a recently used port by a
second, or sent it to a real server that had left.
"""


def ipvs_settings(kernel: tuple[int, int], strict_arp: bool = False) -> Iterator[KernelSetting]:
    """Yield the settings that mode ipvs relies on, for a kernel of this version (row 24.5).

    `strict_arp`: this machine answers ARP requests for an address only on the link that has it, so that other machines
    do not send the traffic of a Service here.
    """
    # Without connection tracking nothing that IPVS has sent on is masqueraded.
    yield KernelSetting(_IPVS + "conntrack", 1, "mode ipvs")
    if _REUSE_MATTERS[0] <= kernel < _REUSE_MATTERS[1]:
        yield KernelSetting(_IPVS + "conn_reuse_mode", 0, "mode ipvs")
    # A client's connections to a real server that is gone end, and so does its persistence when it is on its way out.
    yield KernelSetting(_IPVS + "expire_nodest_conn", 1, "mode ipvs")
    yield KernelSetting(_IPVS + "expire_quiescent_template", 1, "mode ipvs")
    yield KernelSetting("net/ipv4/ip_forward", 1, "mode ipvs")
    if strict_arp:
        yield KernelSetting("net/ipv4/conf/all/arp_ignore", 1, "strictARP", unasked="ipvs.strictARP: false")
        yield KernelSetting("net/ipv4/conf/all/arp_announce", 2, "strictARP", unasked="ipvs.strictARP: false")
