"""Takes away what Narthex or a kube-proxy left in a network namespace, in every mode or in all but one.

Cheap looks come first: where nothing is left, no program is started.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from narthex.backends.iptables_frame import ROUTE_LOCALNET
from narthex.backends.iptables_names import OWN_TABLES
from narthex.backends.leftovers import (
    IPVS_LINK,
    Leftovers,
    Owned,
    find,
    has_kubelet,
    is_leftover_chain,
    is_leftover_set,
    is_leftover_table,
    is_older_chain,
    of_kube_proxy,
    save_chains,
    set_family,
    virtual_services,
)
from narthex.backends.nftables_frame import TABLE
from narthex.backends.userspace_names import USERSPACE
from narthex.host import netns
from narthex.host.netlink import NetlinkError, attribute
from narthex.host.nfnetlink import DELETE_TABLE, FAMILY_NUMBERS, NfNetlink
from narthex.host.run import CommandError, TimeoutExpired, run
from narthex.host.variants import VARIANTS, command_of, default_variant
from narthex.model.net import IPFamily
from narthex.netfilter.xtables import SaveTextError

_LOCK_SECONDS = "5"
_PROC_NET = Path("/proc/thread-self/net")
_LEGACY_NAMES = {IPFamily.IPV4: "ip_tables_names", IPFamily.IPV6: "ip6_tables_names"}


class Removed(msgspec.Struct, frozen=True):
    """Objects of one kind that are gone."""

    kind: str
    family: IPFamily
    names: tuple[str, ...]


class Left(msgspec.Struct, frozen=True):
    """An object, or several, that should have gone and did not."""

    kind: str
    family: IPFamily
    name: str
    reason: str


class Outcome(msgspec.Struct, frozen=True):
    """What a clean-up did."""

    removed: tuple[Removed, ...] = ()
    left: tuple[Left, ...] = ()
    transactions: int = 0
    """Of nf_tables, that it made."""


class Cleanup:
    """Of one network namespace (None: the present one). `keep` is the mode whose rules stay, with route_localnet if
    `keep_localnet`; None: none do."""

    def __init__(self, namespace: str | None = None, keep: str | None = None, keep_localnet: bool = False) -> None:
        self._namespace = namespace
        self._keep = keep
        self._keep_localnet = keep_localnet
        self._removed: dict[str, tuple[str, ...]] = {}
        self._left: list[Left] = []
        self._transactions = 0

    def clean(self, family: IPFamily) -> Outcome:
        """Remove what can be removed of a family. Never raises for what the kernel or a tool refuses: that is told."""
        self._removed, self._left, self._transactions = {}, [], 0
        tables, chains = self._look(family)
        found = False
        for variant in VARIANTS:
            found |= self._clean_iptables(family, variant, chains)
        for table in tables:
            if is_leftover_table(table) and not (self._keep == "nftables" and table == TABLE):
                self._delete_table(family, table)
        links = self._links()
        if found or self._keep is None or IPVS_LINK in links:
            self._clean_ipvs(family, IPVS_LINK in links)
        removed = (Removed(kind, family, names) for kind, names in self._removed.items())
        return Outcome(tuple(removed), tuple(self._left), self._transactions)

    def came_back(self, family: IPFamily, removed: Iterable[str]) -> bool:
        """Whether something of these names is in nf_tables again, after `clean` removed it."""
        tables, chains = self._look(family)
        present = {f"{family.nft} {table}" for table in tables} | {f"{table} {name}" for table, name in chains}
        return not present.isdisjoint(removed)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _look(self, family: IPFamily) -> tuple[list[str], list[tuple[str, str]]]:
        """Tables of nf_tables, and chains of those tables that iptables uses."""
        try:
            netlink = NfNetlink(self._namespace)
            tables = netlink.tables(FAMILY_NUMBERS[family.value])
            ours = set(OWN_TABLES).intersection(tables)
            chains = netlink.chains(FAMILY_NUMBERS[family.value]) if ours else []
            netlink.close()
        except OSError as error:
            self._left.append(Left("nftables table", family, "any", f"cannot be looked at: {error}"))
            return [], []
        return tables, [(table, name) for table, name in chains if table in ours]

    def _links(self) -> set[str]:
        with netns.entered(self._namespace):
            return {name for _, name in socket.if_nameindex()}

    def _proc_net(self, name: str) -> str:
        with netns.entered(self._namespace):
            path = _PROC_NET / name
            return path.read_text() if path.exists() else ""

    def _owned(self, family: IPFamily, variant: str) -> Owned:
        """Today's chains of mode iptables are the Target's own business, in the variant that it uses."""
        if self._keep == "userspace" and variant == default_variant(family):
            return lambda table, chain: is_leftover_chain(table, chain) and not USERSPACE.is_ours(table, chain)
        stays = self._keep == "iptables" and variant == default_variant(family)
        return is_older_chain if stays else is_leftover_chain

    # ---- iptables --------------------------------------------------------------------------------------------------

    def _clean_iptables(self, family: IPFamily, variant: str, chains: Sequence[tuple[str, str]]) -> bool:
        """True when something was there."""
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
            self._left.append(Left(f"iptables-{variant} chains", family, "any", reason))
            return True
        try:
            text = "".join(run([f"{command}-save", *more], namespace=self._namespace) for more in words)
            kubelet = has_kubelet(chains if variant == "nft" else save_chains(text))
            leftovers = find(text, family, kubelet, owned)
        except (CommandError, SaveTextError, TimeoutExpired, OSError) as error:
            self._left.append(Left(f"iptables-{variant} chains", family, "any", f"cannot be read: {error}"))
            return True
        for one in leftovers:
            self._restore(one, family, variant, command)
        return bool(leftovers)

    def _restore(self, leftovers: Leftovers, family: IPFamily, variant: str, command: str) -> None:
        kind, table = f"iptables-{variant} chain", leftovers.table
        for chain, reason in leftovers.kept.items():
            self._left.append(Left(kind, family, f"{table} {chain}", reason))
        if leftovers.guard and family is IPFamily.IPV4 and not self._keep_localnet:
            # First: without the guard it would let neighbours reach this node's loopback.
            self._close_localnet()
        if not leftovers.script:
            return
        jumps = tuple(f"{table} {chain}: {rule}" for chain, rule in leftovers.jumps)
        chains = tuple(f"{table} {chain}" for chain in leftovers.chains)
        if self._try(
            kind,
            family,
            f"{len(chains)} chains and {len(jumps)} jumps of table {table}",
            lambda: self._run([f"{command}-restore", "--noflush", "--wait", _LOCK_SECONDS], leftovers.script),
        ):
            self._transactions += variant == "nft"
            self._add(f"iptables-{variant} jump", jumps)
            self._add(kind, chains)

    def _close_localnet(self) -> None:
        path, _ = ROUTE_LOCALNET
        setting = Path("/proc/sys") / path

        def close() -> None:
            with netns.entered(self._namespace):
                if setting.read_text().strip() != "0":
                    setting.write_text("0")
                    self._add("setting", (path,))

        self._try("setting", IPFamily.IPV4, path, close)

    # ---- nftables --------------------------------------------------------------------------------------------------

    def _delete_table(self, family: IPFamily, table: str) -> None:
        number = int(FAMILY_NUMBERS[family.value])
        name = f"{family.nft} {table}"

        def delete() -> None:
            # With all that is in it, in one transaction.
            netlink = NfNetlink(self._namespace)
            netlink.commit(number, [(DELETE_TABLE, attribute(1, table.encode() + b"\0"))])
            netlink.close()

        if self._try("nftables table", family, name, delete):
            self._transactions += 1
            self._add("nftables table", (name,))

    # ---- ipvs ------------------------------------------------------------------------------------------------------

    def _clean_ipvs(self, family: IPFamily, link: bool) -> None:
        """The rules that use the sets are gone by now."""
        sets = self._run_if_there(["ipset", "save"])
        if link and family is IPFamily.IPV4:
            self._try("IPVS service", family, "any", lambda: self._clean_virtual_services(sets))
            if self._try("link", family, IPVS_LINK, lambda: self._run(["ip", "link", "delete", IPVS_LINK])):
                self._add("link", (IPVS_LINK,))
        names = [words[1] for words in map(str.split, sets.splitlines()) if words[:1] == ["create"]]
        gone = [
            name
            for name in names
            if is_leftover_set(name)
            and set_family(name) is family
            and self._try("ipset", family, name, self._runner(["ipset", "destroy", name]))
        ]
        self._add("ipset", tuple(gone))

    def _clean_virtual_services(self, sets: str) -> None:
        """All of both families: the link carries the addresses of both."""
        services = virtual_services(self._proc_net("ip_vs"))
        if not services:
            return
        shown = json.loads(self._run(["ip", "-json", "address", "show", "dev", IPVS_LINK]))
        addresses = {each["local"] for one in shown for each in one.get("addr_info", ())}
        gone = []
        for one in of_kube_proxy(services, addresses, sets):
            where = str(one).partition("/")[0]
            argv = ["ipvsadm", "--delete-service", f"--{one.protocol.lower()}-service", where]
            if self._try("IPVS service", IPFamily.IPV4, str(one), self._runner(argv)):
                gone.append(str(one))
        self._add("IPVS service", tuple(gone))

    # ---- doing -----------------------------------------------------------------------------------------------------

    def _add(self, kind: str, names: tuple[str, ...]) -> None:
        if names:
            self._removed[kind] = self._removed.get(kind, ()) + names

    def _try(self, kind: str, family: IPFamily, name: str, action: Callable[[], object]) -> bool:
        """Do it; if that fails, note why and return False."""
        try:
            action()
        except FileNotFoundError as error:
            reason = f"{error.filename or 'the program that could do it'} is not installed"
        except (CommandError, TimeoutExpired, OSError) as error:
            reason = (error.strerror or "") if isinstance(error, NetlinkError) else str(error)
        else:
            return True
        self._left.append(Left(kind, family, name, reason))
        return False

    def _run(self, argv: list[str], stdin: str = "") -> str:
        return run(argv, stdin=stdin, namespace=self._namespace)

    def _runner(self, argv: list[str]) -> Callable[[], str]:
        return lambda: self._run(argv)

    def _run_if_there(self, argv: list[str]) -> str:
        """What it prints; nothing when it is not installed, or the kernel has nothing for it."""
        if shutil.which(argv[0]) is None:
            return ""
        try:
            return self._run(argv)
        except (CommandError, TimeoutExpired):
            return ""
