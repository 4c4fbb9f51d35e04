"""The overlay's reconciliation of Nodes and kernel state.

Level-triggered: notifications only trigger a reconciliation. A failed one leaves the state in force and is retried.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from narthex.linux.clock import Clock
from narthex.linux.sysctls import apply_sysctls
from narthex.model import FAMILIES, Delete, Event, IPFamily, Node, Synced, Upsert, contains
from narthex.overlay.annotations import AnnotationKeys, LeaseAttributes, lease_annotations
from narthex.overlay.changes import (
    AddDevice,
    AddDeviceAddress,
    OverlayChange,
    OverlayState,
    PutEntry,
    own_address,
    plan_changes,
    retained_device,
)
from narthex.overlay.desired import (
    DesiredState,
    ExternalInterface,
    KernelRoute,
    OverlayFdbEntry,
    OverlayNeighbor,
    OverlayRoute,
    VxlanDevice,
    desired_state,
    device_name,
    family_of_device,
    pod_mtu,
)
from narthex.overlay.interfaces import InterfaceSelection, select_interface
from narthex.overlay.kernel import files
from narthex.overlay.kernel.kernel import OverlayKernel, described
from narthex.overlay.kernel.rules import MasqueradeError, MasqueradeWriter
from narthex.overlay.masquerade import MasqueradeRules
from narthex.overlay.net_conf import VXLAN, NetConf, NetConfError, parse, subnet_env
from narthex.overlay.peers import OverlayPeer, node_subnets, overlay_peers, without_conflicts
from narthex.overlay.program.annotate import hardware_address, public_ips
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.runtime.configuration.values import OverlayConfiguration
from narthex.runtime.logs import LOGGER

_MOST_LINES = 20
_RETAINED_SECONDS = 60.0
"""Time for which a device of a previous configuration stays after the last peer published that it needs it no more.

A peer whose watch is interrupted learns later that this node changed its backend, and sends through the tunnel until then.
"""
_KINDS = {OverlayNeighbor: "neighbour", OverlayFdbEntry: "fdb", OverlayRoute: "route"}

Annotate = Callable[[Node, Mapping[str, str]], None]


_USUAL = OverlayConfiguration()


class OverlaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings. Several overlays on one machine need separate namespaces and `subnet_file`s."""

    node: str
    net_conf: str = _USUAL.net_conf
    subnet_file: str = _USUAL.subnet_file
    routes_file: str = ""
    """File of our own routes over the external interface; empty: next to `subnet_file`."""
    choice: InterfaceSelection = InterfaceSelection()
    public_ips: tuple[str, ...] = ()
    """Addresses that peers send to, at most one per family; default: those of the interface."""
    masquerade: bool = True
    forward_rules: bool = True
    """Accept Pod traffic in the FORWARD chain, whose policy may be DROP."""
    annotation_prefix: str = _USUAL.annotation_prefix
    set_condition: bool = True
    repair_checksums: bool = True
    resync: float = 10.0
    """Seconds between full reconciliations; changes that the kernel reports are repaired at once."""

    def __post_init__(self) -> None:
        if not self.routes_file:
            msgspec.structs.force_setattr(self, "routes_file", f"{self.subnet_file}.routes")


def settings_of(configuration: OverlayConfiguration, node: str) -> OverlaySettings:
    """Return the settings of a configuration file's section."""
    return OverlaySettings(
        node=node,
        net_conf=configuration.net_conf,
        subnet_file=configuration.subnet_file,
        choice=InterfaceSelection(
            names=configuration.interfaces,
            patterns=configuration.interface_patterns,
            can_reach=configuration.interface_can_reach,
        ),
        public_ips=configuration.public_ips,
        masquerade=configuration.masquerade,
        forward_rules=configuration.forward_rules,
        annotation_prefix=configuration.annotation_prefix,
        set_condition=configuration.network_condition,
        repair_checksums=configuration.repair_checksums,
    )


class Overlay:
    """Reconciles the network namespace of the calling thread. Used by that thread only."""

    def __init__(
        self,
        settings: OverlaySettings,
        take: Callable[[], Iterable[Event]],
        kernel: OverlayKernel,
        clock: Clock,
        metrics: OverlayMetrics,
        annotate: Annotate | None,
        rules_changed: Callable[[], bool],
        problems: Callable[[], Iterable[Any]],
    ) -> None:
        """Set the collaborators.

        `take` returns new Node events, `problems` the problems of their source. `annotate` publishes this node; None: there is no
        API server, and peers derive what they need. `rules_changed` returns True if masquerading rules may have changed.
        """
        self._settings = settings
        self._take = take
        self._kernel = kernel
        self._clock = clock
        self._metrics = metrics
        self._annotate_node = annotate
        self._rules_changed = rules_changed
        self._problems = problems
        self._keys = AnnotationKeys(settings.annotation_prefix)
        self._conf_file = ConfFile(settings.net_conf)
        self._nodes: dict[str, Node] = {}
        self._synced = False
        self._macs: dict[str, str] = {}
        self._unused_since: dict[str, float] = {}
        """Since when no peer needs a device of a previous configuration, by name."""
        self._own_routes: frozenset[OverlayRoute] | None = None
        self._in_force = DesiredState()
        self._rules: MasqueradeWriter | None = None
        self._rules_in_force: dict[IPFamily, object] = {}
        self._sources: Mapping[IPFamily, Mapping[str, str]] = {}
        """For which the rules were last reconciled."""
        self._without_nftables: set[IPFamily] = set()
        self._refused: tuple[str, ...] = ()
        """Kernel settings that could not be applied at the last full resync."""
        self._next_full = -math.inf
        self.links: frozenset[int] = frozenset()
        """Indexes of the links whose changes trigger a reconciliation."""
        self.tunnels: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
        """For the self-test: name, own address, and peer addresses of each vxlan device."""

    def reconcile(self) -> float:
        """Reconcile once; return the seconds until the next reconciliation. Errors that a later one can fix are reported, not raised."""
        self._take_events()
        self._metrics.last_reconcile = now = self._clock.now()
        source_problems = tuple(str(problem) for problem in self._problems() if _of_nodes(problem))
        if not self._synced:
            # Without the complete list of Nodes, nothing can be recognized as stale.
            self._metrics.report(self._metrics.failure, source_problems)
            self._metrics.failure = "the list of Nodes is not available yet"
            return 1.0
        full = now >= self._next_full
        problems: tuple[str, ...] = ()
        try:
            problems = self._look(full)
        except (ValueError, OSError, MasqueradeError) as error:
            self._metrics.broken = not isinstance(error, ValueError)
            # The next reconciliation reads what has been applied.
            self._metrics.report(str(error), source_problems)
            self._next_full = min(self._next_full, now + 1.0) if full else now + 1.0
        else:
            self._metrics.report("", (*source_problems, *problems))
            if full:
                self._next_full = now + self._settings.resync
            self._metrics.ready, self._metrics.broken = True, False
            self._metrics.last_sync = self._clock.wall()
            self._metrics.syncs += 1
        return max(0.0, self._next_full - self._clock.now())

    def _take_events(self) -> None:
        for event in self._take():
            match event:
                case Upsert(object=Node() as node):
                    self._nodes[node.name] = node
                case Delete(kind="Node", key=key):
                    self._nodes.pop(key.name, None)
                case Synced():
                    self._synced = True

    def _look(self, full: bool) -> tuple[str, ...]:
        """Reconcile; return the problems. Raises ValueError, OSError, and MasqueradeError if this node cannot join the overlay."""
        name = self._settings.node
        conf = self._conf_file.read()
        node = self._nodes.get(name)
        subnets = node_subnets(node, name, conf)
        assert node is not None
        families = [family for family in FAMILIES if family in subnets]
        external = external_interfaces(self._kernel, self._settings, families)
        own_ips = public_ips(node, self._keys, self._settings.public_ips, external)
        mtu = pod_mtu(conf, external)
        found = overlay_peers(self._nodes.values(), name, conf, self._keys, assumed=self._annotate_node is None)
        peers = without_conflicts(found.usable, name, subnets, own_ips)
        problems = (*found.problems, *peers.problems)
        desired, more = self._apply(conf, node, subnets, external, peers.usable)
        sources = _sources(desired, external)
        if full or sources != self._sources or self._rules_changed():
            self._reconcile_rules(conf, subnets, sources)
            self._sources = sources
        if full:
            self._refused = tuple(
                f"{outcome.setting.path} could not be set to {outcome.setting.value}: {outcome.error}; set it yourself"
                for outcome in apply_sysctls(desired.settings)
                if outcome.error
            )
        text = subnet_env(conf, subnets, mtu, self._settings.masquerade)
        if files.write(self._settings.subnet_file, text):
            LOGGER.info("overlay: wrote %s: %s", self._settings.subnet_file, ", ".join(text.split()))
        self._metrics.peers = len({peer.node for peer in peers.usable})
        self._annotate(conf, node, own_ips)
        self.tunnels = _tunnels(desired)
        return (*filter(None, [self._conf_file.problem]), *problems, *more, *self._refused)

    def _apply(
        self,
        conf: NetConf,
        node: Node,
        subnets: Mapping[IPFamily, str],
        external: Mapping[IPFamily, ExternalInterface],
        peers: tuple[OverlayPeer, ...],
    ) -> tuple[DesiredState, tuple[str, ...]]:
        """Compute and apply the desired state; return it with the problems of peers."""
        names = [device_name(family, conf.backend.vni) for family in external] if conf.backend.type == VXLAN else []
        current, kernel_routes = self._kernel.read(names, tuple(external))
        macs = {}
        for family in external:
            key = device_name(family, conf.backend.vni)
            if key not in self._macs:
                self._macs[key] = hardware_address(
                    node, self._keys, conf, family, current, derived=self._annotate_node is None
                )
            macs[family] = self._macs[key]
        outside = [route for route in kernel_routes if not _within(route, conf.networks)]
        retained = self._retained(conf, subnets, current, peers)
        desired, problems = desired_state(conf, subnets, peers, external, macs, outside, retained)
        routes_file = self._settings.routes_file
        if self._own_routes is None:
            self._own_routes = files.read_routes(routes_file)
        direct = frozenset(route for route in desired.routes if not route.onlink)
        changes = plan_changes(desired, current, conf.networks, self._own_routes)
        if not direct <= self._own_routes:
            # Persist them before adding them: the process may be killed in between.
            self._own_routes |= direct
            files.write_routes(routes_file, self._own_routes)
        if changes:
            self._kernel.apply(changes)
            self._record(changes)
            # Link indexes may have changed.
            current, _ = self._kernel.read(names, tuple(external))
        if self._own_routes != direct:
            self._own_routes = direct
            files.write_routes(routes_file, direct)
        self._in_force = desired
        self.links = frozenset(
            [*(one.index for one in external.values()), *(one.index for one in current.devices.values())]
        )
        return desired, problems

    def _retained(
        self, conf: NetConf, subnets: Mapping[IPFamily, str], current: OverlayState, peers: Iterable[OverlayPeer]
    ) -> tuple[VxlanDevice, ...]:
        """Return the VXLAN devices of a previous configuration that stay for now, as the kernel has them."""
        if conf.backend.type == VXLAN:
            return ()
        now, kept = self._clock.now(), []
        needed = {peer.family for peer in peers if peer.mac}
        for held in current.devices.values():
            family = family_of_device(held.name)
            if held.kind != VXLAN or family is None or family not in subnets:
                continue
            if family in needed:
                self._unused_since.pop(held.name, None)
            elif now - self._unused_since.setdefault(held.name, now) >= _RETAINED_SECONDS:
                continue
            kept.append(retained_device(held, family, subnets[family]))
        return tuple(kept)

    def _record(self, changes: Sequence[OverlayChange]) -> None:
        before, healed = self._in_force, []
        devices = {device.name for device in before.devices}
        addresses = {(device.name, own_address(device)) for device in before.devices}
        fresh = {change.device.name for change in changes if isinstance(change, AddDevice)}
        for change in changes:
            match change:
                case AddDevice(device) if device.name in devices:
                    healed.append("device")
                case AddDeviceAddress(device=name, address=address) if (
                    name not in fresh and (name, address) in addresses
                ):
                    healed.append("address")
                case PutEntry(entry) if entry.device not in fresh and (
                    entry in before.neighbours or entry in before.forwards or entry in before.routes
                ):
                    healed.append(_KINDS[type(entry)])
        for change in changes[:_MOST_LINES]:
            LOGGER.info("overlay: %s", described(change))
        if len(changes) > _MOST_LINES:
            LOGGER.info("overlay: and %d more changes", len(changes) - _MOST_LINES)
        self._metrics.healed.update(healed)

    def _reconcile_rules(
        self, conf: NetConf, subnets: Mapping[IPFamily, str], sources: Mapping[IPFamily, Mapping[str, str]]
    ) -> None:
        settings = self._settings
        if self._rules is None or self._rules.nftables is not conf.nftables:
            self._rules = MasqueradeWriter(nftables=conf.nftables)
        for family, subnet in subnets.items():
            cluster = conf.network(family)
            rules = MasqueradeRules(
                family,
                cluster,
                subnet,
                masquerade=settings.masquerade,
                forward=settings.forward_rules,
                sources=sources[family],
            )
            what = (conf.nftables, cluster, subnet, sources[family])
            changed = self._rules.reconcile(rules)
            if self._reconcile_to_peers(rules) or changed:
                if self._rules_in_force.get(family) == what:
                    self._metrics.healed["rules"] += 1
                LOGGER.info("overlay: masquerading rules of %s written", family.label)
            self._rules_in_force[family] = what

    def _reconcile_to_peers(self, rules: MasqueradeRules) -> bool:
        assert self._rules is not None
        try:
            return self._rules.reconcile_to_peers(rules)
        except MasqueradeError as error:
            if rules.family not in self._without_nftables:
                self._without_nftables.add(rules.family)
                LOGGER.warning(
                    "overlay: %s. A later change of the backend will end masqueraded connections to other nodes", error
                )
            return False

    def _annotate(self, conf: NetConf, node: Node, own_ips: Mapping[IPFamily, str]) -> None:
        if self._annotate_node is None:
            return
        own = {
            family: LeaseAttributes(public_ip=ip, mac=self._macs.get(device_name(family, conf.backend.vni), ""))
            for family, ip in own_ips.items()
        }
        self._annotate_node(node, lease_annotations(self._keys, conf.backend, own))


def _sources(
    desired: DesiredState, external: Mapping[IPFamily, ExternalInterface]
) -> Mapping[IPFamily, Mapping[str, str]]:
    """Return the addresses that this node has towards its peers, by family and link."""
    return {
        family: {interface.link: interface.address}
        | {device.name: device.address for device in desired.devices if device.family is family}
        for family, interface in external.items()
    }


def _of_nodes(problem: Any) -> bool:
    """Return True if a problem concerns a Node, or the source itself (such as "API server")."""
    subject = getattr(problem, "object", "")
    return getattr(problem, "severity", "error") == "error" and (
        not subject or subject.startswith(("Node ", "API server"))
    )


def _within(route: KernelRoute, networks: Iterable[str]) -> bool:
    """Return True if a route leads into the Pod networks."""
    address = route.destination.partition("/")[0]
    return not route.destination.endswith("/0") and any(contains(network, address) for network in networks)


def _tunnels(desired: DesiredState) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    return tuple(
        (
            device.name,
            device.address,
            tuple(sorted(one.address for one in desired.neighbours if one.device == device.name)),
        )
        for device in desired.devices
    )


class ConfFile:
    """`net-conf.json`, read again when it changes. Invalid content leaves the previous one in force."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._data: bytes | None = None
        self._conf: NetConf | None = None
        self.problem = ""
        """Why the current content is not in force; empty if it is."""

    def read(self) -> NetConf:
        """Return the configuration in force. Raises NetConfError if there was no valid one yet."""
        try:
            data = Path(self._path).read_bytes()
        except OSError as error:
            self._fail(NetConfError(f"{self._path}: {error.strerror or error}; write flannel's net-conf.json there"))
        else:
            if data != self._data or self._conf is None:
                try:
                    self._conf, self._data, self.problem = parse(data, self._path), data, ""
                except NetConfError as error:
                    self._fail(error)
        assert self._conf is not None
        return self._conf

    def _fail(self, error: NetConfError) -> None:
        if self._conf is None:
            raise error
        self._data, self.problem = None, f"{error}; the previous content stays in force"


def external_interfaces(
    kernel: OverlayKernel, settings: OverlaySettings, families: Sequence[IPFamily]
) -> dict[IPFamily, ExternalInterface]:
    """Return the link between the nodes, by family. Raises InterfaceNotFound, OSError."""
    link = select_interface(
        settings.choice, kernel.links(), families, lambda: kernel.default_link(families), _source_towards
    )
    return {
        family: ExternalInterface(link=link.name, index=link.index, address=link.address(family), mtu=link.mtu)
        for family in families
    }


def _source_towards(address: str) -> str:
    """Return the source address of packets to an address; empty if there is no route. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""
