"""The overlay's loop: look at the Nodes and at the kernel, and make the one fit the other.

Level-triggered: notices say when to look, never what. A look that fails leaves all as it is and is made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from narthex.linux import sysctls
from narthex.linux.clock import Clock
from narthex.linux.errors import ApplyError
from narthex.model.net import FAMILIES, IPFamily, contains
from narthex.model.objects import Node
from narthex.model.store import Delete, Event, Synced, Upsert
from narthex.overlay.annotations import AnnotationKeys, LeaseAttributes, lease_annotations
from narthex.overlay.changes import AddDevice, AddDeviceAddress, OverlayChange, PutEntry, own_address, plan_changes
from narthex.overlay.desired import (
    DesiredState,
    ExternalInterface,
    KernelRoute,
    OverlayFdbEntry,
    OverlayNeighbor,
    OverlayRoute,
    desired_state,
    device_name,
    pod_mtu,
)
from narthex.overlay.kernel import files
from narthex.overlay.kernel.kernel import OverlayKernel, described
from narthex.overlay.kernel.rules import MasqueradeWriter
from narthex.overlay.masquerade import MasqueradeRules
from narthex.overlay.net_conf import VXLAN, NetConf, subnet_env
from narthex.overlay.peers import OverlayPeer, node_subnets, overlay_peers, without_conflicts
from narthex.overlay.program.metrics import OverlayMetrics
from narthex.overlay.program.own import ConfFile, hardware_address, outers, public_ips
from narthex.overlay.program.settings import OverlaySettings
from narthex.runtime.logs import LOGGER

_MOST_LINES = 20
"""Of the log, for the steps of one look."""
_KINDS = {OverlayNeighbor: "neighbour", OverlayFdbEntry: "fdb", OverlayRoute: "route"}

Announce = Callable[[Node, Mapping[str, str]], None]


class Overlay:
    """For the network namespace of the calling thread, and to be used by that thread alone."""

    def __init__(
        self,
        settings: OverlaySettings,
        take: Callable[[], Iterable[Event]],
        kernel: OverlayKernel,
        clock: Clock,
        figures: OverlayMetrics,
        announce: Announce | None,
        look_at_rules: Callable[[], bool],
        problems: Callable[[], Iterable[Any]],
    ) -> None:
        """`take` gives what is new of the Nodes, `problems` what is wrong with their source. `announce` tells others of this
        node; None: nobody can be told, and they work out what they need. `look_at_rules`: whether masquerading rules may
        have changed."""
        self._settings = settings
        self._take = take
        self._kernel = kernel
        self._clock = clock
        self._figures = figures
        self._announce = announce
        self._look_at_rules = look_at_rules
        self._problems = problems
        self._keys = AnnotationKeys(settings.annotation_prefix)
        self._conf_file = ConfFile(settings.net_conf)
        self._nodes: dict[str, Node] = {}
        self._synced = False
        self._macs: dict[str, str] = {}
        self._made: frozenset[OverlayRoute] | None = None
        self._in_force = DesiredState()
        self._rules: MasqueradeWriter | None = None
        self._rules_in_force: dict[IPFamily, object] = {}
        self._refused: tuple[str, ...] = ()
        """Kernel settings that could not be applied at the last full resync."""
        self._next_full = -math.inf
        self.links: frozenset[int] = frozenset()
        """Indexes of the links whose changes trigger a reconciliation."""
        self.tunnels: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
        """For the self-test: name, own address, and peer addresses of each vxlan device."""

    def look(self) -> float:
        """Look once; seconds until the next time that something must be looked at unasked. Raises nothing that a later
        look could mend."""
        self._take_events()
        self._figures.last_look = now = self._clock.now()
        told = tuple(str(problem) for problem in self._problems() if _of_nodes(problem))
        if not self._synced:
            # Without all Nodes nobody knows what is stale: what is in force stays.
            self._figures.say(self._figures.failure, told)
            self._figures.failure = "the list of Nodes is not there yet"
            return 1.0
        full = now >= self._next_full
        problems: tuple[str, ...] = ()
        try:
            problems = self._look(full)
        except (ValueError, OSError, ApplyError) as error:
            self._figures.broken = not isinstance(error, ValueError)
            # Whatever was done is seen at the next look.
            self._figures.say(str(error), told)
            self._next_full = min(self._next_full, now + 1.0) if full else now + 1.0
        else:
            self._figures.say("", (*told, *problems))
            if full:
                self._next_full = now + self._settings.resync
            self._figures.ready, self._figures.broken = True, False
            self._figures.last_sync = self._clock.wall()
            self._figures.syncs += 1
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
        """Raises ValueError, OSError and ApplyError when this node cannot have its part in it."""
        name = self._settings.node
        conf = self._conf_file.read()
        node = self._nodes.get(name)
        subnets = node_subnets(node, name, conf)
        assert node is not None
        families = [family for family in FAMILIES if family in subnets]
        outer = outers(self._kernel, self._settings, families)
        own_ips = public_ips(node, self._keys, self._settings, outer)
        mtu = pod_mtu(conf, outer)
        found = overlay_peers(self._nodes.values(), name, conf, self._keys, assumed=self._announce is None)
        peers = without_conflicts(found.usable, name, subnets, own_ips)
        problems = (*found.problems, *peers.problems)
        want, more = self._mend(conf, node, subnets, outer, peers.usable)
        if full or self._look_at_rules():
            self._keep_rules(conf, subnets)
        if full:
            self._refused = tuple(
                f"{outcome.setting.path} could not be set to {outcome.setting.value}: {outcome.error}; set it yourself"
                for outcome in sysctls.apply(want.settings)
                if outcome.error
            )
        text = subnet_env(conf, subnets, mtu, self._settings.masquerade)
        if files.write(self._settings.subnet_file, text):
            LOGGER.info("overlay: wrote %s: %s", self._settings.subnet_file, ", ".join(text.split()))
        self._figures.peers = len({peer.node for peer in peers.usable})
        self._tell(conf, node, own_ips)
        self.tunnels = _tunnels(want)
        return (*filter(None, [self._conf_file.problem]), *problems, *more, *self._refused)

    def _mend(
        self,
        conf: NetConf,
        node: Node,
        subnets: Mapping[IPFamily, str],
        outer: Mapping[IPFamily, ExternalInterface],
        peers: tuple[OverlayPeer, ...],
    ) -> tuple[DesiredState, tuple[str, ...]]:
        """Make the kernel have what it must have."""
        names = [device_name(family, conf.backend.vni) for family in outer] if conf.backend.type == VXLAN else []
        have, ways = self._kernel.read(names, tuple(outer))
        macs = {}
        for family in outer:
            key = device_name(family, conf.backend.vni)
            if key not in self._macs:
                self._macs[key] = hardware_address(node, self._keys, conf, family, have, derived=self._announce is None)
            macs[family] = self._macs[key]
        outside = [way for way in ways if not _within(way, conf.networks)]
        want, problems = desired_state(conf, subnets, peers, outer, macs, outside)
        routes_file = self._settings.routes_file
        if self._made is None:
            self._made = files.read_routes(routes_file)
        direct = frozenset(route for route in want.routes if not route.onlink)
        steps = plan_changes(want, have, conf.networks, self._made)
        if not direct <= self._made:
            # Before they are made: whoever ends between the two must know them afterwards.
            self._made |= direct
            files.write_routes(routes_file, self._made)
        if steps:
            self._kernel.apply(steps)
            self._note(steps)
            # The links' numbers may be others now.
            have, _ = self._kernel.read(names, tuple(outer))
        if self._made != direct:
            self._made = direct
            files.write_routes(routes_file, direct)
        self._in_force = want
        self.links = frozenset([*(one.index for one in outer.values()), *(one.index for one in have.devices.values())])
        return want, problems

    def _note(self, steps: Sequence[OverlayChange]) -> None:
        """Count and log what was done."""
        before, healed = self._in_force, []
        devices = {device.name for device in before.devices}
        addresses = {(device.name, own_address(device)) for device in before.devices}
        fresh = {step.device.name for step in steps if isinstance(step, AddDevice)}
        for step in steps:
            match step:
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
        for step in steps[:_MOST_LINES]:
            LOGGER.info("overlay: %s", described(step))
        if len(steps) > _MOST_LINES:
            LOGGER.info("overlay: and %d more steps", len(steps) - _MOST_LINES)
        self._figures.healed.update(healed)

    def _keep_rules(self, conf: NetConf, subnets: Mapping[IPFamily, str]) -> None:
        settings = self._settings
        if self._rules is None or self._rules.nftables is not conf.nftables:
            self._rules = MasqueradeWriter(nftables=conf.nftables)
        for family, subnet in subnets.items():
            cluster = conf.network(family)
            wish = MasqueradeRules(
                family, cluster, subnet, masquerade=settings.masquerade, forward=settings.forward_rules
            )
            what = (conf.nftables, cluster, subnet)
            if self._rules.keep(wish):
                if self._rules_in_force.get(family) == what:
                    self._figures.healed["rules"] += 1
                LOGGER.info("overlay: masquerading rules of %s written", family.label)
            self._rules_in_force[family] = what

    def _tell(self, conf: NetConf, node: Node, own_ips: Mapping[IPFamily, str]) -> None:
        if self._announce is None:
            return
        own = {
            family: LeaseAttributes(public_ip=ip, mac=self._macs.get(device_name(family, conf.backend.vni), ""))
            for family, ip in own_ips.items()
        }
        self._announce(node, lease_annotations(self._keys, conf.backend, own))


def _of_nodes(problem: Any) -> bool:
    """Whether a problem of the source matters here: of a Node, or of the source itself (an API server has a name there)."""
    whose = getattr(problem, "object", "")
    return getattr(problem, "severity", "error") == "error" and (not whose or whose.startswith(("Node ", "API server")))


def _within(way: KernelRoute, networks: Iterable[str]) -> bool:
    """Whether a route is one into the pods' networks."""
    address = way.destination.partition("/")[0]
    return not way.destination.endswith("/0") and any(contains(network, address) for network in networks)


def _tunnels(want: DesiredState) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    return tuple(
        (
            device.name,
            device.address,
            tuple(sorted(one.address for one in want.neighbours if one.device == device.name)),
        )
        for device in want.devices
    )
