"""Socket load balancing in the kernel: maps, programs, and links of one cgroup, pinned so that they outlive the process.

Pins are named after what they hold: a map after its layout, a program after its instructions. A process that starts takes
over what has the same name, creates the rest, and replaces the programs of the links atomically. So connections are
balanced while no process runs, while it restarts, and during an upgrade.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from narthex.bpf import AttachKind, BpfProgramSpec, MapSpec
from narthex.linux.bpf import (
    BpfError,
    BpfLink,
    BpfMap,
    BpfProgram,
    attached_links,
    can_load,
    file_system_problem,
    pinned_names,
)
from narthex.linux.cgroups import cgroup_mount
from narthex.linux.socket_diag import ConnectedSocket
from narthex.model import IPFamily
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.counters import ConnectionCount
from narthex.proxy.backends.sockets import PIN_DIRECTORY
from narthex.proxy.backends.sockets.document import PinnedSockets
from narthex.proxy.backends.sockets.layout import (
    COUNT,
    OPEN_COUNT,
    WATCHED,
    Capacity,
    FamilyMaps,
    counted_endpoint,
    family_maps,
    place_of,
)
from narthex.proxy.backends.sockets.open_connections import release_program
from narthex.proxy.backends.sockets.programs import programs
from narthex.proxy.backends.sockets.rows import CountedPort, KernelRows, MapWrites, SocketChanges

PINS = Path(PIN_DIRECTORY)
_SO_NETNS_COOKIE = 71
_LINK = "-link"
"""End of the name of a pinned link. Names in a BPF file system have no dots."""


class SocketsUnavailableError(RuntimeError):
    """This machine cannot balance sockets; the message has the reason and what to do."""


def netns_cookie() -> int:
    """Return the number of the calling thread's network namespace (Linux 5.14), unique until the machine restarts."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        return int(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8))[0])


def cgroup_path(configured: str) -> Path:
    """Return the cgroup whose sockets are balanced: the configured one, or the root of the hierarchy.

    Raises SocketsUnavailableError if there is no hierarchy of version 2, or if the path is not in one.
    """
    mount = cgroup_mount()
    if mount is None:
        raise SocketsUnavailableError(
            "no cgroup v2 hierarchy is mounted: mount one (mount -t cgroup2 none /sys/fs/cgroup)"
        )
    path = Path(configured) if configured else mount
    if not (path / "cgroup.procs").exists():
        raise SocketsUnavailableError(f"{path} is no cgroup: create it, or correct socketLoadBalancingCgroup")
    return path


def missing_feature() -> str:
    """Return why this kernel or process cannot run the programs; empty if it can."""
    if sys.byteorder != "little":
        return "the programs are for little-endian machines"
    layouts = {family: family_maps(family, Capacity()) for family in IPFamily}
    for spec in (*programs(layouts, 1), release_program(layouts[IPFamily.IPV4])):
        if reason := can_load(spec.kind, spec.attach):
            if "not permitted" in reason:
                return "loading BPF programs needs root (CAP_BPF, CAP_NET_ADMIN, and CAP_SYS_ADMIN)"
            return f"the kernel does not load programs of type {reason}"
    try:
        netns_cookie()
    except OSError:
        return "the kernel does not tell the number of a network namespace: Linux 5.14 or newer is needed"
    return ""


class SocketTarget:
    """The objects of one cgroup. Not thread-safe, except for reading counters."""

    def __init__(self, cgroup: Path, pins: Path = PINS) -> None:
        """Prepare for the network namespace of the calling thread. Nothing is opened or written."""
        self.cgroup = cgroup
        self._node_cookie = netns_cookie()
        self._pins = pins / f"netns-{self._node_cookie}"
        self._capacity = dict.fromkeys(IPFamily, Capacity())
        self._maps: dict[str, BpfMap] = {}
        self.active = False
        """The programs in force are those for the present maps."""
        self._counting: set[IPFamily] = set()
        """Families whose sockets are counted until they end."""

    @property
    def writes(self) -> int:
        """Elements that were written or deleted."""
        return sum(each.writes for each in self._maps.values())

    def open(self) -> None:
        """Open or create the maps. Raises SocketsUnavailableError or ApplyError."""
        if reason := missing_feature() or file_system_problem(self._pins.parent):
            raise SocketsUnavailableError(reason)
        with _as_apply_error("cannot create the maps of socket load balancing"):
            self._pins.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._restore_capacity()
            for spec in self._specs():
                self._maps[spec.name] = self._map(spec)
            for family in IPFamily:
                # Which endpoints an earlier process has ejected means nothing to this one.
                table = self.table(self._family(family).watched)
                table.delete_many([key for key, _ in table.items()])
        # An earlier process has counted sockets, which may still be open.
        names = pinned_names(self._pins)
        self._counting = {
            family for family in IPFamily if f"{release_program(self._family(family)).name}{_LINK}" in names
        }

    def _restore_capacity(self) -> None:
        """Take over the capacity of the maps that are pinned, so that a restart does not shrink them."""
        names = pinned_names(self._pins)
        for family in IPFamily:
            sizes = [Capacity(services=1 << bits, frontends=1 << bits, slots=1 << (bits + 3)) for bits in range(13, 22)]
            for capacity in sizes:
                if all(_map_pin(spec) in names for spec in family_maps(family, capacity).all):
                    self._capacity[family] = capacity

    def ensure(self, family: IPFamily, services: int, frontends: int, slots: int) -> bool:
        """Create larger maps for a family if necessary; return False if its maps are new and empty. Raises ApplyError."""
        have = self._capacity[family]
        if services <= have.services and frontends <= have.frontends and slots <= have.slots:
            return True
        bits = max((2 * max(services, frontends) - 1).bit_length(), (2 * slots - 1).bit_length() - 3)
        self._capacity[family] = Capacity(services=1 << bits, frontends=1 << bits, slots=1 << (bits + 3))
        with _as_apply_error("cannot enlarge the maps of socket load balancing"):
            for spec in self._family(family).all:
                old = self._maps[spec.name]
                if old.spec.layout != spec.layout:
                    self._maps[spec.name] = self._map(spec)
                    old.close()
        self.active = False
        return False

    @property
    def layouts(self) -> dict[IPFamily, FamilyMaps]:
        """The maps of each family."""
        return {family: self._family(family) for family in IPFamily}

    def table(self, spec: MapSpec) -> BpfMap:
        """Return a map that is open. Larger ones may replace it later."""
        return self._maps[spec.name]

    def _family(self, family: IPFamily) -> FamilyMaps:
        return family_maps(family, self._capacity[family])

    def _specs(self) -> Iterator[MapSpec]:
        for family in IPFamily:
            yield from self._family(family).all

    def _map(self, spec: MapSpec) -> BpfMap:
        path = str(self._pins / _map_pin(spec))
        try:
            return BpfMap.open(path, spec)
        except BpfError:
            Path(path).unlink(missing_ok=True)
        made = BpfMap.create(spec)
        made.pin(path)
        return made

    def look(self) -> PinnedSockets:
        """Return what is pinned for the families whose maps are complete, without creating any. Raises ApplyError."""
        self._restore_capacity()
        names = pinned_names(self._pins)
        rows: dict[IPFamily, KernelRows] = {}
        connections: dict[IPFamily, dict[bytes, int]] = {}
        opens: dict[IPFamily, dict[bytes, int]] = {}
        watched: dict[IPFamily, dict[bytes, int]] = {}
        try:
            for family in IPFamily:
                maps = self._family(family)
                needed = (maps.frontends, maps.pools, maps.slots, maps.counts, maps.opens, maps.watched)
                if not all(_map_pin(spec) in names for spec in needed):
                    continue
                with _as_apply_error("cannot open the maps of socket load balancing"):
                    for spec in needed:
                        self._maps[spec.name] = BpfMap.open(str(self._pins / _map_pin(spec)), spec)
                    connections[family] = dict(_counters(self.table(maps.counts)))
                    opens[family] = {key: OPEN_COUNT.unpack(value)[0] for key, value in self.table(maps.opens).items()}
                    watched[family] = {key: WATCHED.unpack(value)[1] for key, value in self.table(maps.watched).items()}
                rows[family] = self.read(family)
        finally:
            self.close()
        hooks = self._hooks(names)
        return PinnedSockets(rows=rows, connections=connections, opens=opens, watched=watched, hooks=hooks)

    def _hooks(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the hooks whose pinned links are attached to a cgroup that exists."""
        hooks = {int(attach): attach.name.lower() for attach in AttachKind}
        found = []
        for name in names:
            if not name.endswith(_LINK):
                continue
            with suppress(BpfError):
                link = BpfLink.open(str(self._pins / name))
                state = link.state
                link.close()
                if state.cgroup:
                    found.append(hooks.get(state.attach, str(state.attach)))
        return tuple(sorted(found))

    # ---- rows ------------------------------------------------------------------------------------------------------

    def read(self, family: IPFamily) -> KernelRows:
        """Return the rows of a family. Raises ApplyError."""
        maps = self._family(family)
        with _as_apply_error("cannot read the maps of socket load balancing"):
            slots = dict(self._maps[maps.slots.name].items())
            frontends = dict(self._maps[maps.frontends.name].items())
            counts: dict[int, int] = {}
            if slots or frontends:
                used = {struct.unpack("=II", key)[1] for key in slots}
                table = self._maps[maps.pools.name]
                for pool in used:
                    value = table.lookup(COUNT.pack(pool))
                    if value and (count := COUNT.unpack(value)[0]):
                        counts[pool] = count
        return KernelRows(frontends=frontends, counts=counts, slots=slots)

    def apply(self, family: IPFamily, changes: SocketChanges) -> None:
        """Write changes. Raises ApplyError; the state of the maps is then unknown."""
        maps = self._family(family)
        parts: tuple[tuple[MapSpec, MapWrites], ...] = (
            (maps.slots, changes.slots),
            (maps.pools, changes.pools),
            (maps.frontends, changes.frontends),
        )
        with _as_apply_error("cannot write the maps of socket load balancing"):
            for spec, writes in parts:
                if writes.keys:
                    self._maps[spec.name].update_many(writes.keys, writes.values)
            for spec, writes in reversed(parts):
                if writes.deleted:
                    self._maps[spec.name].delete_many(writes.deleted)

    def read_counters(self, family: IPFamily, counted: Mapping[int, CountedPort]) -> list[ConnectionCount]:
        """Return the connections that sockets sent to each endpoint. Raises ApplyError.

        `counted` has the Service ports by number. Counters of Service ports that no longer exist are deleted, and so
        are counters of endpoints that left, once their connections are part of the result.
        """
        spec = self._family(family).counts
        found, gone = [], []
        with _as_apply_error("cannot read the counters of socket load balancing"):
            # A descriptor of its own, since the loop may replace the maps meanwhile.
            table = BpfMap.open(str(self._pins / _map_pin(spec)), spec)
            for key, count in _counters(table):
                number, address, port = counted_endpoint(family, key)
                port_of = counted.get(number)
                if port_of is None or not port_of.has(key[4:]):
                    gone.append(key)
                if port_of is None:
                    continue
                found.append(ConnectionCount(("sockets", key), port_of.name, (address, port), count))
                found.append(ConnectionCount(("sockets", key, "service"), port_of.name, None, count))
            table.delete_many(gone)
            table.close()
            self._forget_unused(family)
        return found

    def _forget_unused(self, family: IPFamily) -> None:
        """Make room for counts of open connections: delete those that are zero, if many are there.

        A connection that is made at this moment may stay uncounted.
        """
        if family not in self._counting:
            return
        spec = self._family(family).opens
        table = BpfMap.open(str(self._pins / _map_pin(spec)), spec)
        held = dict(table.items())
        if 2 * len(held) > spec.max_entries:
            table.delete_many([key for key, value in held.items() if not any(value)])
        table.close()

    def origins(self, family: IPFamily, sockets: Iterable[ConnectedSocket]) -> list[tuple[str, int] | None]:
        """Return the frontend that each connected socket asked for; None if no program changed its destination.

        Raises BpfError.
        """
        table = self._maps[self._family(family).origins.name]
        kind = socket.AF_INET if family is IPFamily.IPV4 else socket.AF_INET6
        found: list[tuple[str, int] | None] = []
        for each in sockets:
            address, port = each.peer
            end = socket.inet_pton(kind, address) + struct.pack(">HH", port, 0)
            value = table.lookup(struct.pack("=Q", each.cookie) + end)
            asked = None
            if value is not None:
                asked = place_of(family, value)
            found.append(asked)
        return found

    # ---- programs --------------------------------------------------------------------------------------------------

    def activate(self) -> None:
        """Attach the programs for the present maps, or replace those that are attached. Raises ApplyError."""
        by_family = self.layouts
        kept = {_map_pin(spec) for spec in self._specs()}
        with _as_apply_error("cannot attach the programs of socket load balancing"):
            folder = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
            try:
                for family in self._counting:
                    kept |= self._attach(release_program(by_family[family]), folder)
                for spec in programs(by_family, self._node_cookie):
                    kept |= self._attach(spec, folder)
            finally:
                os.close(folder)
            for name in pinned_names(self._pins) - kept:
                (self._pins / name).unlink()
        self.active = True

    def count_open(self, family: IPFamily) -> None:
        """Prepare for a Service port that asks for the least connections: have ends of sockets counted. Raises ApplyError."""
        if family not in self._counting:
            self._counting.add(family)
            if self.active:
                self.activate()

    def _attach(self, spec: BpfProgramSpec, cgroup: int) -> set[str]:
        """Attach one program; return the names of its pins."""
        program_pin, link_pin = f"{spec.name}-{spec.digest}", f"{spec.name}{_LINK}"
        ids = {self._maps[name].id for name in spec.maps}
        program = self._program(spec, self._pins / program_pin, ids)
        link = self._link(self._pins / link_pin, spec)
        try:
            if link is None:
                link = BpfLink.create(program, cgroup, spec.attach)
                link.pin(str(self._pins / link_pin))
            elif link.state.program != program.id:
                link.replace(program)
        finally:
            program.close()
            if link is not None:
                link.close()
        return {program_pin, link_pin}

    def _program(self, spec: BpfProgramSpec, path: Path, maps: set[int]) -> BpfProgram:
        with suppress(BpfError):
            found = BpfProgram.open(str(path), spec.name)
            if found.map_ids == maps:
                return found
            found.close()
            path.unlink()
        made = BpfProgram.load(spec, self._maps)
        made.pin(str(path))
        return made

    def _link(self, path: Path, spec: BpfProgramSpec) -> BpfLink | None:
        """Return the pinned link if it is attached to our cgroup."""
        try:
            link = BpfLink.open(str(path))
        except BpfError:
            return None
        if link.state.cgroup == self.cgroup.stat().st_ino and link.state.attach == spec.attach:
            return link
        link.close()
        path.unlink()
        return None

    def attached(self) -> int:
        """Return how many programs are attached to the cgroup. Raises ApplyError."""
        with _as_apply_error("cannot list the programs of the cgroup"):
            return sum(1 for _ in attached_links(self.cgroup.stat().st_ino))

    def close(self) -> None:
        """Close the maps. Pins keep everything at work."""
        for each in self._maps.values():
            each.close()
        self._maps.clear()


def _counters(table: BpfMap) -> Iterator[tuple[bytes, int]]:
    """Yield the keys of a map with a number for each processor, and the sums."""
    for key, value in table.items():
        yield key, sum(struct.unpack(f"={len(value) // 8}Q", value))


def pinned_sockets(pins: Path = PINS) -> PinnedSockets:
    """Return what is pinned for the network namespace of the calling thread; false if nothing is.

    It creates nothing. Raises ApplyError, and OSError if the kernel does not tell the namespace's number.
    """
    target = SocketTarget(Path(), pins)
    return target.look()


def remove_pins(family: IPFamily, pins: Path = PINS) -> tuple[str, ...]:
    """Remove the objects of a family for the network namespace of the calling thread; return the names of their pins.

    Raises OSError. Connections that exist continue: they lead to their endpoints.
    """
    try:
        directory = pins / f"netns-{netns_cookie()}"
    except OSError:
        return ()
    number = "4" if family is IPFamily.IPV4 else "6"
    mine = (name for name in pinned_names(directory) if name.partition("-")[0].endswith(number))
    names = sorted(mine, key=lambda name: (not name.endswith(_LINK), name))
    for name in names:
        path = directory / name
        if name.endswith(_LINK):
            # A descriptor that leaked to another process would keep it attached.
            with suppress(BpfError):
                link = BpfLink.open(str(path))
                link.detach()
                link.close()
        path.unlink()
    if names and not pinned_names(directory):
        directory.rmdir()
    return tuple(names)


def _map_pin(spec: MapSpec) -> str:
    return f"{spec.name}-{spec.layout}"


@contextmanager
def _as_apply_error(what: str) -> Iterator[None]:
    """Turn errors of the kernel into ApplyError."""
    try:
        yield
    except OSError as error:
        raise ApplyError(f"{what}: {error.strerror or error}") from error
