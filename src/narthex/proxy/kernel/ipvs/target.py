"""The ipvs Target: virtual servers by netlink, addresses on kube-ipvs0, sets, and a few fixed iptables rules."""

from __future__ import annotations

import msgspec
from immutables import Map

from narthex.linux import ipset
from narthex.model.net import IPFamily, in_any
from narthex.proxy.backends.base import Target
from narthex.proxy.backends.iptables.rules import XtablesRules
from narthex.proxy.backends.ipvs import names
from narthex.proxy.backends.ipvs import rules as ipvs_rules
from narthex.proxy.backends.ipvs.rules import IpvsChanges, IpvsRules
from narthex.proxy.backends.leftovers import is_virtual_server
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.kernel.ipvs import link as ipvs_link
from narthex.proxy.kernel.ipvs.servers import TEND_SECONDS, IpvsServers


class IpvsTarget(Target[IpvsRules, IpvsChanges]):
    """All of one namespace and family. See `narthex.proxy.backends.base.Target`.

    Virtual servers count as ours when they are at an address of kube-ipvs0 or when our sets name them, and when their
    address is not inside `excluded` (row 24.10). Others are neither read nor touched.
    """

    def __init__(
        self,
        family: IPFamily,
        namespace: str | None = None,
        excluded: tuple[str, ...] = (),
        patience: float = TEND_SECONDS,
    ) -> None:
        """`patience`: seconds between two looks at real servers that leave."""
        self._family = family
        self._namespace = namespace
        self._excluded = excluded
        self._tables = IptablesTarget(family, namespace, owner=names.IPVS_CHAINS)
        self._servers = IpvsServers(family, namespace, patience)
        self._kinds = {names.set_name(name, family): kind for name, kind in names.KINDS.items()}

    def read(self) -> IpvsRules | None:
        """What is ours in the kernel now. Raises ApplyError when it cannot be read."""
        tables, held = self._tables.read(), self._read_beside()
        if tables is None and held is None:
            return None
        nothing = XtablesRules(self._family, {}, Map())
        held = held or IpvsRules(self._family, Map(), frozenset(), {}, nothing)
        if tables is None or any(each.kind != self._kinds[name] for name, each in held.sets.items()):
            # A set of another kind can only be made anew, and so must the rules that name it be.
            tables = nothing
        return IpvsRules(self._family, held.servers, held.bound, held.sets, tables)

    def _read_beside(self) -> IpvsRules | None:
        """All but the iptables part."""
        sets = ipset.read(self._kinds.__contains__, self._namespace)
        bound = ipvs_link.addresses(self._family, self._namespace)
        servers = self._servers.read(
            lambda key: not in_any(self._excluded, key[0]) and is_virtual_server(key, bound, sets)
        )
        if not sets and not bound and not servers:
            return None
        return IpvsRules(self._family, Map(servers), bound, sets, XtablesRules(self._family, {}, Map()))

    def apply(self, changes: IpvsChanges) -> None:
        """Write the changes. Raises ApplyError.

        A packet that meets a virtual server finds the sets and rules for it in place: they come before it and go after
        it. An address goes last, since a virtual server is known as ours by it.
        """
        if changes.replace:
            changes = self._differences(changes)
        namespace = self._namespace
        ipvs_link.bind(changes.bind, namespace)
        remade = sorted({each.name for each in changes.sets_added}.intersection(changes.sets_removed))
        if remade:
            self._tables.clean()
            ipset.destroy(remade, namespace)
        ipset.write(changes.sets_added, {name: each.added for name, each in changes.entries.items()}, {}, namespace)
        if changes.tables:
            self._tables.apply(changes.tables)
        self._servers.change(changes.servers_added, changes.servers_edited, changes.servers_removed, changes.reals)
        ipset.write((), {}, {name: each.removed for name, each in changes.entries.items()}, namespace)
        ipset.destroy([name for name in changes.sets_removed if name not in remade], namespace)
        ipvs_link.unbind(changes.unbind, namespace)

    def tend(self) -> float | None:
        """Remove real servers that have left and that no connection needs any more (row 24.8). Returns the seconds
        until it wants to be called again, None when nothing is leaving."""
        return self._servers.tend()

    def clean(self) -> None:
        """Remove everything that is ours. Raises ApplyError."""
        held = self._read_beside()
        bound = held.bound if held is not None else frozenset()
        self._tables.clean()
        if held is not None:
            self._servers.change(removed=list(held.servers))
            ipset.destroy(sorted(held.sets), self._namespace)
        if ipvs_link.addresses(None, self._namespace) - bound:
            # The other family's are there as well.
            ipvs_link.unbind(bound, self._namespace)
        else:
            ipvs_link.remove(self._namespace)

    def _differences(self, changes: IpvsChanges) -> IpvsChanges:
        """What a replacement really changes: whatever is right already is left in peace."""
        found = self._read_beside()
        if found is None:
            return msgspec.structs.replace(changes, replace=False)
        want = ipvs_rules.patch(found, changes)
        return msgspec.structs.replace(ipvs_rules.diff(found, want), tables=changes.tables)
