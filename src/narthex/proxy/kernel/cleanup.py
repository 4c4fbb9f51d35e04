"""Removes what Narthex or kube-proxy left in a network namespace, of every mode or of all but one.

Cheap checks come first: where nothing is left, no program is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from narthex.linux.iptables_variants import VARIANTS, command_of, default_variant
from narthex.linux.namespaces import in_namespace
from narthex.linux.netlink import NetlinkError, attribute
from narthex.linux.nfnetlink import DELETE_TABLE, FAMILY_NUMBERS, NfNetlink
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.model import IPFamily, join_port
from narthex.netfilter.ipset import IpSet
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.iptables.frame import ROUTE_LOCALNET
from narthex.proxy.backends.iptables.names import OWN_TABLES
from narthex.proxy.backends.ipvs.names import LINK
from narthex.proxy.backends.leftovers import (
    Leftovers,
    Owned,
    find,
    has_kubelet,
    is_leftover_chain,
    is_leftover_set,
    is_leftover_table,
    is_virtual_server,
    save_chains,
    set_family,
)
from narthex.proxy.backends.sockets import PIN_DIRECTORY
from narthex.proxy.kernel import ipvs_link
from narthex.proxy.kernel.dataplanes import DATAPLANES, OwnedObjects
from narthex.proxy.kernel.ipset import destroy_ipsets, read_ipsets
from narthex.proxy.kernel.virtual_servers import IpvsServers

_LOCK_SECONDS = "5"
_PROC_NET = Path("/proc/thread-self/net")
_LEGACY_NAMES = {IPFamily.IPV4: "ip_tables_names", IPFamily.IPV6: "ip6_tables_names"}


class RemovedObjects(msgspec.Struct, frozen=True):
    """Removed objects of one kind."""

    kind: str
    family: IPFamily
    names: tuple[str, ...]


class RemainingObject(msgspec.Struct, frozen=True):
    """An object, or several, that could not be removed."""

    kind: str
    family: IPFamily
    name: str
    reason: str


class CleanupOutcome(msgspec.Struct, frozen=True):
    """The result of a clean-up."""

    removed: tuple[RemovedObjects, ...] = ()
    left: tuple[RemainingObject, ...] = ()
    transactions: int = 0
    """Number of nf_tables transactions made."""


class Cleanup:
    """Removes leftovers from one network namespace; None: the current one.

    `keep` is the mode whose rules stay, with route_localnet if `keep_localnet` is set; None: no rules stay.
    """

    def __init__(self, namespace: str | None = None, keep: str | None = None, keep_localnet: bool = False) -> None:
        self._namespace = namespace
        self._keep = keep
        self._kept = DATAPLANES[keep].owned if keep is not None else OwnedObjects()
        self._keep_localnet = keep_localnet
        self._removed: dict[str, tuple[str, ...]] = {}
        self._left: list[RemainingObject] = []
        self._transactions = 0

    def clean(self, family: IPFamily) -> CleanupOutcome:
        """Remove the leftovers of a family. Refusals of the kernel or of a tool are part of the result, not raised."""
        self._removed, self._left, self._transactions = {}, [], 0
        tables, chains = self._look(family)
        found = False
        for variant in VARIANTS:
            found |= self._clean_iptables(family, variant, chains)
        for table in tables:
            if is_leftover_table(table) and table not in self._kept.tables:
                self._delete_table(family, table)
        if not self._kept.virtual_servers and (found or self._keep is None or ipvs_link.exists(self._namespace)):
            self._clean_ipvs(family)
        if self._keep is None:
            self._try("BPF pin", family, "any", lambda: self._clean_sockets(family))
        removed = (RemovedObjects(kind, family, names) for kind, names in self._removed.items())
        return CleanupOutcome(tuple(removed), tuple(self._left), self._transactions)

    def came_back(self, family: IPFamily, removed: Iterable[str]) -> bool:
        """Return True if an object with one of these names exists in nf_tables again, after `clean` removed it."""
        tables, chains = self._look(family)
        present = {f"{family.nft} {table}" for table in tables} | {f"{table} {name}" for table, name in chains}
        return not present.isdisjoint(removed)

    def _look(self, family: IPFamily) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the tables of nf_tables, and the chains of those that iptables uses."""
        try:
            netlink = NfNetlink(self._namespace)
            tables = netlink.tables(FAMILY_NUMBERS[family.value])
            ours = set(OWN_TABLES).intersection(tables)
            chains = netlink.chains(FAMILY_NUMBERS[family.value]) if ours else []
            netlink.close()
        except OSError as error:
            self._left.append(RemainingObject("nftables table", family, "any", f"cannot be looked at: {error}"))
            return [], []
        return tables, [(table, name) for table, name in chains if table in ours]

    def _proc_net(self, name: str) -> str:
        with in_namespace(self._namespace):
            path = _PROC_NET / name
            return path.read_text() if path.exists() else ""

    def _owned(self, family: IPFamily, variant: str) -> Owned:
        """Return what to remove.

        The Target of the running mode maintains its chains itself, in the variant that it uses.
        """
        kept = self._kept.chains
        if kept is None or variant != default_variant(family):
            return is_leftover_chain
        return lambda table, chain: is_leftover_chain(table, chain) and not kept.is_ours(table, chain)

    def _clean_iptables(self, family: IPFamily, variant: str, chains: Sequence[tuple[str, str]]) -> bool:
        """Remove leftovers of one iptables variant. Returns True if there were any."""
        owned = self._owned(family, variant)
        if variant == "nft":
            tables = [table for table in OWN_TABLES if any(table == of and owned(of, name) for of, name in chains)]
            words = [["-t", table] for table in tables]
        else:
            # To ask for a legacy table makes it; those that are there are listed.
            words = [[]] if self._proc_net(_LEGACY_NAMES[family]).split() else []
        if not words:
            return False
        command = command_of(family, variant)
        if command is None:
            reason = f"no iptables of this kind is installed: install iptables, with its {variant} variant"
            self._left.append(RemainingObject(f"iptables-{variant} chains", family, "any", reason))
            return True
        try:
            text = "".join(run([f"{command}-save", *more], namespace=self._namespace) for more in words)
            kubelet = has_kubelet(chains if variant == "nft" else save_chains(text))
            leftovers = find(text, family, kubelet, owned)
        except (CommandError, SaveTextError, TimeoutExpired, OSError) as error:
            self._left.append(RemainingObject(f"iptables-{variant} chains", family, "any", f"cannot be read: {error}"))
            return True
        for one in leftovers:
            self._restore(one, family, variant, command)
        return bool(leftovers)

    def _restore(self, leftovers: Leftovers, family: IPFamily, variant: str, command: str) -> None:
        kind, table = f"iptables-{variant} chain", leftovers.table
        for chain, reason in leftovers.kept.items():
            self._left.append(RemainingObject(kind, family, f"{table} {chain}", reason))
        if leftovers.guard and family is IPFamily.IPV4 and not self._keep_localnet:
            # First: without the guard it would let neighbours reach this node's loopback.
            self._close_localnet()
        if not leftovers.script:
            return
        jumps = tuple(f"{table} {chain}: {rule}" for chain, rule in leftovers.jumps)
        chains = tuple(f"{table} {chain}" for chain in leftovers.chains)
        restore = [f"{command}-restore", "--noflush", "--wait", _LOCK_SECONDS]
        if self._try(
            kind,
            family,
            f"{len(chains)} chains and {len(jumps)} jumps of table {table}",
            lambda: run(restore, stdin=leftovers.script, namespace=self._namespace),
        ):
            self._transactions += variant == "nft"
            self._add(f"iptables-{variant} jump", jumps)
            self._add(kind, chains)

    def _close_localnet(self) -> None:
        path, _ = ROUTE_LOCALNET
        setting = Path("/proc/sys") / path

        def close() -> None:
            """Set the setting to 0 in the namespace and report it, unless it is 0 already."""
            with in_namespace(self._namespace):
                if setting.read_text().strip() != "0":
                    setting.write_text("0")
                    self._add("setting", (path,))

        self._try("setting", IPFamily.IPV4, path, close)

    def _delete_table(self, family: IPFamily, table: str) -> None:
        number = int(FAMILY_NUMBERS[family.value])
        name = f"{family.nft} {table}"

        def delete() -> None:
            """Delete the table with all its contents in one transaction."""
            # With all that is in it, in one transaction.
            netlink = NfNetlink(self._namespace)
            netlink.commit(number, [(DELETE_TABLE, attribute(1, table.encode() + b"\0"))])
            netlink.close()

        if self._try("nftables table", family, name, delete):
            self._transactions += 1
            self._add("nftables table", (name,))

    def _clean_ipvs(self, family: IPFamily) -> None:
        """Remove sets, virtual servers, and the link. The rules that use the sets are gone already."""
        try:
            sets = read_ipsets(is_leftover_set, self._namespace)
        except ApplyError:
            # Not installed, or nothing in this kernel: then there are none.
            sets = {}
        bound = ipvs_link.addresses(family, self._namespace)
        if (sets or bound) and self._proc_net("ip_vs"):
            self._try("IPVS service", family, "any", lambda: self._clean_virtual_servers(family, bound, sets))
        mine = sorted(name for name in sets if set_family(name) is family)
        destroyed = [
            name for name in mine if self._try("ipset", family, name, partial(destroy_ipsets, [name], self._namespace))
        ]
        self._add("ipset", tuple(destroyed))
        if bound:
            self._try("address", family, "any", lambda: ipvs_link.unbind(bound, self._namespace))
        empty = ipvs_link.exists(self._namespace) and not ipvs_link.addresses(None, self._namespace)
        if empty and self._try("link", family, LINK, lambda: ipvs_link.remove(self._namespace)):
            self._add("link", (LINK,))

    def _clean_sockets(self, family: IPFamily) -> None:
        if not Path(PIN_DIRECTORY).exists():
            return
        from narthex.proxy.kernel.sockets import remove_pins

        with in_namespace(self._namespace):
            self._add("BPF pin", remove_pins(family))

    def _clean_virtual_servers(self, family: IPFamily, bound: frozenset[str], sets: Mapping[str, IpSet]) -> None:
        servers = IpvsServers(family, self._namespace)
        held = list(servers.read(lambda key: is_virtual_server(key, bound, sets)))
        servers.change(removed=held)
        self._add("IPVS service", tuple(f"{join_port(address, port)}/{word.value}" for address, word, port in held))

    def _add(self, kind: str, names: tuple[str, ...]) -> None:
        if names:
            self._removed[kind] = self._removed.get(kind, ()) + names

    def _try(self, kind: str, family: IPFamily, name: str, action: Callable[[], object]) -> bool:
        """Run the action. If it fails, record the reason and return False."""
        try:
            action()
        except FileNotFoundError as error:
            reason = f"{error.filename or 'the program that could do it'} is not installed"
        except (CommandError, TimeoutExpired, ApplyError, OSError) as error:
            reason = (error.strerror or "") if isinstance(error, NetlinkError) else str(error)
        else:
            return True
        self._left.append(RemainingObject(kind, family, name, reason))
        return False
