"""The modes of the proxy. Everything that differs between modes is in this file, or is reached from it.

A `Dataplane` holds for one mode its backend, its kernel targets and counters, how changes by other programs are
noticed, what clean-up leaves alone, the kernel settings and programs that the mode needs, and what it does differently
from other modes. `DATAPLANES` lists all modes. Only this file and the parser of the configuration compare the name of a
mode.

Of a mode only its names are imported before it is needed: a proxy runs one mode.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from narthex.linux.monitor import ForeignChanges, NftablesMonitor, RuleScope, watch_rules
from narthex.linux.privileges import kernel_release, missing_tools, nft_release
from narthex.model import IPFamily
from narthex.model.kernel_setting import KernelSetting
from narthex.netfilter.xtables.values import builtin_chains
from narthex.proxy.backends import BACKENDS
from narthex.proxy.backends.base import ApplyError, Backend, Target
from narthex.proxy.backends.iptables.names import IPTABLES_CHAINS, OWN_TABLES, ChainOwnership
from narthex.proxy.backends.ipvs.names import IPVS_CHAINS
from narthex.proxy.backends.nftables.frame import TABLE
from narthex.proxy.backends.userspace.names import USERSPACE_CHAINS
from narthex.proxy.plan.ir import Plan
from narthex.proxy.plan.planner import NodeConfig
from narthex.runtime.configuration.file import ProxyConfiguration
from narthex.runtime.configuration.values import LOCALHOST_GATE, IpvsConfiguration
from narthex.runtime.logs import LOGGER
from narthex.runtime.process import StartError

if TYPE_CHECKING:
    from narthex.proxy.backends.counters import ConnectionCount

OLDEST_KERNEL = (5, 13)
"""Oldest kernel that mode nftables supports (row 23.1)."""
OLDEST_NFT = (1, 0, 1)
"""Oldest nft that mode nftables supports (row 23.1)."""
SKIP_KERNEL_CHECK = "KUBE_PROXY_NFTABLES_SKIP_KERNEL_VERSION_CHECK"
FEW_ELEMENTS = 50
"""Receiving the notifications of so many elements costs less than leaving the notification group meanwhile."""
_PACKAGES = {"nft": "nftables", "ipset": "ipset"}
"""Package of a program; all other programs are part of iptables."""
_IPTABLES_TOOLS = {
    IPFamily.IPV4: ("iptables-save", "iptables-restore"),
    IPFamily.IPV6: ("ip6tables-save", "ip6tables-restore"),
}

CounterReader = Callable[[Plan, bool], "Iterable[ConnectionCount]"]
"""Reads the kernel's counters for a plan that is in force. The second argument asks for the counters of single
endpoints, which may cost much more. Raises ApplyError. A reader has its own socket and is not thread-safe."""


class DataplaneOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that dataplanes depend on. Each uses its own part of it."""

    ipvs: IpvsConfiguration = IpvsConfiguration()
    relay_ports: tuple[int, int] | None = None
    """First and last port of the relay; None: the default range."""
    udp_idle_seconds: float | None = None
    """Idle time after which the relay forgets a UDP client; None: the default."""
    sockets: bool = False
    """Send sockets to endpoints when they connect, where the mode can."""
    socket_cgroup: str = ""
    """The cgroup whose sockets are balanced; empty: the root of the hierarchy."""
    ejection: bool = False
    """Send no sockets to endpoints that connections fail to reach."""


_DEFAULT_OPTIONS = DataplaneOptions()


class OwnedObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel objects of one mode, which clean-up leaves alone while the mode runs."""

    tables: frozenset[str] = frozenset()
    """Names of nftables tables."""
    chains: ChainOwnership | None = None
    """Chains of iptables."""
    virtual_servers: bool = False
    """IPVS virtual servers, their ipsets, and the link that holds their addresses."""


class Dataplane(ABC):
    """One mode of the proxy with its options. Creating it starts nothing and writes nothing."""

    mode: ClassVar[str] = ""
    """The `mode` of KubeProxyConfiguration."""
    owned: ClassVar[OwnedObjects]
    """The kernel objects of the mode."""
    deprecated: ClassVar[bool] = False
    """Kubernetes has deprecated the mode."""
    localhost_node_ports: ClassVar[bool] = False
    """Node ports can answer on 127.0.0.1 (row 9.9)."""
    route_localnet: ClassVar[bool] = False
    """Node ports on 127.0.0.1 depend on the kernel setting route_localnet and its guard (row 9.11)."""
    relays_localhost: ClassVar[bool] = False
    """Node ports answer on loopback through a relay, behind a feature gate (row 9.13)."""
    primary_node_ports: ClassVar[bool] = False
    """Without nodePortAddresses, node ports answer on the node's primary addresses only (row 9.1)."""
    needs_node_addresses: ClassVar[bool] = False
    """The plan must list the addresses of the node, because the kernel is not asked when a packet arrives."""
    binds_addresses: ClassVar[bool] = False
    """The addresses of Services are bound to a link of the node."""
    drains_connections: ClassVar[bool] = False
    """TCP connections to endpoints that leave a Service continue until they end (row 24.8)."""
    relays_connections: ClassVar[bool] = False
    """The proxy accepts the connections of clients, and opens others to the endpoints."""
    uses_iptables: ClassVar[bool] = True
    notifies: ClassVar[bool] = True
    """The kernel can notify about every object of the mode."""
    failure_metric: ClassVar[str] = ""
    """Name of kube-proxy's metric for failed syncs in this mode, without prefix."""
    partial_syncs: ClassVar[bool] = False
    """kube-proxy distinguishes full and partial syncs in this mode."""
    rules_by_table: ClassVar[bool] = False
    """kube-proxy counts rules by iptables table in this mode."""

    def __init__(self, options: DataplaneOptions = _DEFAULT_OPTIONS) -> None:
        self.options = options

    @property
    def backend(self) -> Backend[Any, Any]:
        """The pure part: plan to rules."""
        return BACKENDS[self.mode]

    def backend_here(self, families: Iterable[IPFamily]) -> Backend[Any, Any]:  # noqa: ARG002 (most need not ask)
        """Return the backend for the kernel of this machine, in the network namespace of the calling thread."""
        return self.backend

    @property
    def fixed_options(self) -> tuple[object, ...]:
        """Options that cannot change while the process runs."""
        return ()

    def tools(self, family: IPFamily) -> tuple[str, ...]:
        """Return the programs that the mode runs for a family."""
        return _IPTABLES_TOOLS[family]

    @abstractmethod
    def target(self, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
        """Return a Target for one family in a named network namespace; None: that of the calling thread."""

    def rules_in_force(self, family: IPFamily, namespace: str | None = None) -> Any:
        """Return the rules in the kernel as a bystander sees them; None when there are none. Raises ApplyError."""
        return self.target(family, namespace).read()

    def counter_reader(self, family: IPFamily, namespace: str | None = None) -> CounterReader | None:
        """Return a reader of the counters of new connections; None: the mode has none."""
        del family, namespace
        return None

    def invalid_drop_reader(self, family: IPFamily, namespace: str | None = None) -> Callable[[], int] | None:
        """Return a reader of the number of dropped invalid packets; None: the mode drops none. It raises ApplyError."""
        del family, namespace
        return None

    def foreign_changes(self, families: Sequence[IPFamily]) -> ForeignChanges:
        """Return what notices changes by other programs in the network namespace of the calling thread."""
        owned = self.owned
        concern = RuleScope(tables=owned.tables) if owned.chains is None else _concern(owned.chains)
        return watch_rules(concern, families, iptables=self.uses_iptables)

    def is_watched(self, foreign: ForeignChanges) -> bool:
        """Return True if the kernel notifies about all of the mode's objects, so that read-backs can be rare."""
        return self.notifies and isinstance(foreign, NftablesMonitor)

    def transactions(self, changes: Any) -> int:
        """Return the number of nf_tables transactions of some changes; 0: they need no announcement to the monitor."""
        count: int = changes.transactions
        return count

    def kernel_settings(self, kernel: tuple[int, int]) -> Iterator[KernelSetting]:
        """Yield the settings that the rules rely on, for a kernel of this version."""
        del kernel
        yield from ()

    def refusal(self) -> str:
        """Return why the mode cannot run on this machine and what to do; empty when it can."""
        return self._missing_programs()

    def prepare(self) -> None:  # noqa: B027 - most modes need none
        """Prepare the kernel before the first rules. Raises StartError."""

    def _missing_programs(self) -> str:
        missing = missing_tools(self.tools(IPFamily.IPV4))
        if not missing:
            return ""
        packages = " and ".join(dict.fromkeys(_PACKAGES.get(tool, "iptables") for tool in missing))
        return (
            f"mode {self.mode} needs {' and '.join(missing)}, not found on the PATH: "
            f"install the package {packages} or choose another --proxy-mode"
        )


class NftablesDataplane(Dataplane):
    """Mode nftables."""

    mode = "nftables"
    owned = OwnedObjects(tables=frozenset((TABLE,)))
    relays_localhost = True
    primary_node_ports = True
    uses_iptables = False
    failure_metric = "sync_proxy_rules_nftables_sync_failures"
    partial_syncs = True

    @property
    def fixed_options(self) -> tuple[object, ...]:
        """Whether sockets are balanced, and in which cgroup."""
        return self.options.sockets, self.options.socket_cgroup, self.options.ejection

    def tools(self, family: IPFamily) -> tuple[str, ...]:
        """Return nft."""
        del family
        return ("nft",)

    def target(self, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
        """Return the Target of table `narthex`."""
        from narthex.proxy.kernel.nftables import NftablesTarget

        return NftablesTarget(family, namespace)

    def counter_reader(self, family: IPFamily, namespace: str | None = None) -> CounterReader | None:
        """Return a reader of the counters of map elements."""
        from narthex.proxy.backends.counters import NftCounterOwners, counted_sets
        from narthex.proxy.kernel.nftables import NftablesTarget

        nft = NftablesTarget(family, namespace)
        return _PlanCounters(NftCounterOwners, lambda plan, ends: nft.read_counters(counted_sets(plan, ends))).read

    def transactions(self, changes: Any) -> int:
        """Return 0 for a few elements: they go through a socket of this process, which the monitor knows."""
        few = changes.elements_only and changes.element_count() <= FEW_ELEMENTS
        return 0 if few else super().transactions(changes)

    def refusal(self) -> str:
        """Return why the kernel or nft is too old; empty when it is not."""
        if kernel_release() < OLDEST_KERNEL and not os.environ.get(SKIP_KERNEL_CHECK):
            return (
                f"nftables mode needs Linux {OLDEST_KERNEL[0]}.{OLDEST_KERNEL[1]} or newer: choose --proxy-mode iptables, "
                f"or set {SKIP_KERNEL_CHECK}=1 if this kernel has what is needed"
            )
        if missing := self._missing_programs():
            return missing
        if () < nft_release() < OLDEST_NFT:
            oldest = ".".join(map(str, OLDEST_NFT))
            return f"nftables mode needs nft {oldest} or newer: install it, or choose --proxy-mode iptables"
        return ""


class IptablesDataplane(Dataplane):
    """Mode iptables."""

    mode = "iptables"
    owned = OwnedObjects(chains=IPTABLES_CHAINS)
    localhost_node_ports = True
    route_localnet = True
    failure_metric = "sync_proxy_rules_iptables_restore_failures"
    partial_syncs = True
    rules_by_table = True

    def target(self, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
        """Return the Target of kube-proxy's chains."""
        from narthex.proxy.kernel.iptables import IptablesTarget

        return IptablesTarget(family, namespace)

    def counter_reader(self, family: IPFamily, namespace: str | None = None) -> CounterReader | None:
        """Return a reader of the counters of endpoint chains."""
        from narthex.proxy.backends.counters import XtablesCounterOwners
        from narthex.proxy.kernel.iptables import IptablesTarget

        iptables = IptablesTarget(family, namespace)
        return _PlanCounters(XtablesCounterOwners, lambda _plan, _ends: iptables.counters("nat")).read

    def invalid_drop_reader(self, family: IPFamily, namespace: str | None = None) -> Callable[[], int] | None:
        """Return a reader of the counter of the rule that drops invalid packets."""
        from narthex.proxy.backends.counters import invalid_dropped
        from narthex.proxy.kernel.iptables import IptablesTarget

        iptables = IptablesTarget(family, namespace)
        return lambda: invalid_dropped(iptables.counters("filter"))


class IpvsDataplane(Dataplane):
    """Mode ipvs."""

    mode = "ipvs"
    owned = OwnedObjects(chains=IPVS_CHAINS, virtual_servers=True)
    deprecated = True
    needs_node_addresses = True
    binds_addresses = True
    drains_connections = True
    notifies = False
    failure_metric = "sync_proxy_rules_iptables_restore_failures"

    def tools(self, family: IPFamily) -> tuple[str, ...]:
        """Return iptables and ipset."""
        return (*super().tools(family), "ipset")

    @property
    def backend(self) -> Backend[Any, Any]:
        """The backend with the configured scheduler."""
        from narthex.proxy.backends.ipvs.backend import IpvsBackend

        return IpvsBackend(self.options.ipvs.scheduler)

    def backend_here(self, families: Iterable[IPFamily]) -> Backend[Any, Any]:  # noqa: ARG002 (schedulers serve both)
        """Return the backend without the schedulers that the kernel does not have (row 29.19)."""
        from narthex.proxy.backends.ipvs.backend import IpvsBackend
        from narthex.proxy.backends.ipvs.service import SCHEDULERS
        from narthex.proxy.kernel.virtual_servers import missing_schedulers

        return IpvsBackend(self.options.ipvs.scheduler, missing_schedulers(SCHEDULERS.values()))

    @property
    def fixed_options(self) -> tuple[object, ...]:
        """The scheduler and the other options of the section `ipvs`."""
        return (self.options.ipvs,)

    def target(self, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
        """Return the Target of virtual servers, sets, and chains."""
        from narthex.proxy.kernel.ipvs import IpvsTarget

        return IpvsTarget(family, namespace, excluded=self.options.ipvs.exclude_cidrs)

    def transactions(self, changes: Any) -> int:
        """Return the transactions of the iptables part."""
        return super().transactions(changes.tables)

    def kernel_settings(self, kernel: tuple[int, int]) -> Iterator[KernelSetting]:
        """Yield the settings of IPVS, and those of ARP with `strictARP` (row 24.5)."""
        from narthex.proxy.kernel.ipvs import ipvs_settings

        return ipvs_settings(kernel, self.options.ipvs.strict_arp)

    def refusal(self) -> str:
        """Return why the kernel has no usable IPVS, and which modes work instead; empty when it has."""
        from narthex.proxy.kernel import virtual_servers

        if missing := self._missing_programs():
            return missing
        try:
            virtual_servers.connect().close()
        except virtual_servers.NoIpvsError as error:
            others = [mode for mode, kind in DATAPLANES.items() if kind is not IpvsDataplane and not kind().refusal()]
            what_works = f"{' and '.join(others)} would work here" if others else "no other mode works here either"
            return f"mode ipvs cannot run, since {error}: {what_works}"
        return ""

    def prepare(self) -> None:
        """Load the scheduler and set the timeouts of IPVS (rows 24.1, 24.7). Raises StartError."""
        from narthex.netfilter.netlink.ipvs import IpvsTimeouts
        from narthex.proxy.kernel.virtual_servers import check_scheduler, set_timeouts

        ipvs = self.options.ipvs
        desired = IpvsTimeouts(*map(math.ceil, (ipvs.tcp_timeout, ipvs.tcp_fin_timeout, ipvs.udp_timeout)))
        try:
            check_scheduler(ipvs.scheduler or "rr")
            was = set_timeouts(desired)
        except ApplyError as error:
            raise StartError(f"mode ipvs cannot run: {error}") from error
        if was is not None:
            names = zip(("tcp", "tcpFin", "udp"), desired, was, strict=True)
            changed = ", ".join(
                f"{name} to {new} s (it was {old} s)" for name, new, old in names if new not in (0, old)
            )
            LOGGER.info("set the time-outs of IPVS: %s", changed)


class UserspaceDataplane(Dataplane):
    """Mode userspace."""

    mode = "userspace"
    owned = OwnedObjects(chains=USERSPACE_CHAINS)
    localhost_node_ports = True
    relays_connections = True

    @property
    def backend(self) -> Backend[Any, Any]:
        """The backend with the configured ports."""
        return BACKENDS[self.mode] if self.options.relay_ports is None else self._backend()

    def backend_here(self, families: Iterable[IPFamily]) -> Backend[Any, Any]:
        """Return the backend; connections keep TCP timestamps where the kernel cannot remove them."""
        from narthex.proxy.kernel.userspace import missing_plain_tcp

        reason = next(filter(None, map(missing_plain_tcp, families)), "")
        if reason:
            LOGGER.info("the relay copies all data itself: %s", reason)
        return self._backend(plain_tcp=not reason)

    def _backend(self, *, plain_tcp: bool = True) -> Backend[Any, Any]:
        from narthex.proxy.backends.userspace.backend import FIRST, LAST, UserspaceBackend

        return UserspaceBackend(self.options.relay_ports or (FIRST, LAST), plain_tcp=plain_tcp)

    @property
    def fixed_options(self) -> tuple[object, ...]:
        """The ports and the idle time of the relay."""
        return self.options.relay_ports, self.options.udp_idle_seconds

    def target(self, family: IPFamily, namespace: str | None = None) -> Target[Any, Any]:
        """Return the Target of the relay and the rules that lead to it."""
        from narthex.proxy.kernel.userspace import UserspaceTarget

        seconds = self.options.udp_idle_seconds
        return UserspaceTarget(family, namespace, **({} if seconds is None else {"udp_idle_seconds": seconds}))

    def rules_in_force(self, family: IPFamily, namespace: str | None = None) -> Any:
        """Return the rules, and the table of the relay that runs there."""
        from narthex.proxy.kernel.userspace import UserspaceTarget

        return UserspaceTarget(family, namespace).look()


DATAPLANES: Mapping[str, type[Dataplane]] = {
    kind.mode: kind for kind in (NftablesDataplane, IptablesDataplane, IpvsDataplane, UserspaceDataplane)
}
"""By the `mode` of KubeProxyConfiguration, the default first."""


def dataplane(mode: str, options: DataplaneOptions = _DEFAULT_OPTIONS) -> Dataplane:
    """Return the dataplane of a mode. Raises ValueError for an unknown mode."""
    if mode not in DATAPLANES:
        *others, last = DATAPLANES
        raise ValueError(f"{mode!r} is not a proxy mode: use {', '.join(others)} or {last}")
    return DATAPLANES[mode](options)


def _concern(chains: ChainOwnership) -> RuleScope:
    """Return what to watch: own chains, and built-in chains, which hold the jumps to them."""
    return RuleScope(
        tables=frozenset(OWN_TABLES),
        chain=lambda table, name: chains.is_ours(table, name) or name in builtin_chains(table),
    )


class _CounterOwners(Protocol):
    """Assigns counters for one plan: which Service port and endpoint a counter belongs to."""

    def counted(self, raw: Any) -> Iterable[ConnectionCount]:
        """Return the connection counts of the kernel's raw counters."""


class _PlanCounters:
    """Reads counters, and keeps the owners of counters while the plan stays the same."""

    def __init__(self, owners: Callable[[Plan], _CounterOwners], read_raw: Callable[[Plan, bool], Any]) -> None:
        self._owners = owners
        self._read_raw = read_raw
        self._known: tuple[Plan, _CounterOwners] | None = None

    def read(self, plan: Plan, endpoints: bool) -> Iterable[ConnectionCount]:
        """Read the counters; look for their owners only if the plan is another object than last time."""
        if self._known is None or self._known[0] is not plan:
            self._known = plan, self._owners(plan)
        return self._known[1].counted(self._read_raw(plan, endpoints))


def node_config(configuration: ProxyConfiguration, mode: str, node_name: str) -> NodeConfig:
    """Return the planner's configuration, with the defaults of a mode ("" is the default mode).

    `mode` may differ from the configuration's own, since commands can show what another mode would do.
    """
    mode = mode or configuration.mode
    # kube-proxy's ipvs mode takes both masquerade settings from the iptables section (row 27.12).
    section = configuration.rules_section(mode)
    plane = DATAPLANES[mode]
    unset = ("primary",) if plane.primary_node_ports else None
    given = configuration.node_port_addresses
    return NodeConfig(
        node_name=node_name,
        detect_local_mode=configuration.detect_local_mode,
        cluster_cidrs=configuration.detection_cidrs or (),
        bridge_interface=configuration.bridge_interface,
        interface_name_prefix=configuration.interface_name_prefix,
        masquerade_all=section.masquerade_all,
        masquerade_bit=section.masquerade_bit,
        node_port_addresses=unset if given is None else given,
        localhost_node_ports=plane.localhost_node_ports and configuration.iptables.localhost_node_ports,
        relayed_node_ports=plane.relays_localhost and configuration.feature_gate(LOCALHOST_GATE),
        bind_address=configuration.bind_address,
        allow_service_external_ips=configuration.feature_gate("AllowServiceExternalIPs"),
        strict_source_ranges=configuration.own.strict_source_ranges,
        strict_node_port_addresses=configuration.own.strict_node_port_addresses,
    )
