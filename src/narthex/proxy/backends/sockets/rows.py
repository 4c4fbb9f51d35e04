"""The rows of a plan, and the writes that lead from one plan to the next.

`SocketRows` remembers what it has said to write, as the kernel's maps are too slow to be asked. A Service port keeps its
number and its endpoints their slots, so one endpoint's change writes its slot and, if the number of endpoints changes,
the count. Endpoints stay in any order: each has the same probability.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from socket import AF_INET, AF_INET6, inet_pton

import msgspec

from narthex.model import IPFamily, ServicePortName
from narthex.proxy.backends.sockets.layout import (
    ADDRESS_SIZES,
    FRONTEND_VALUE,
    LEAST_CONNECTIONS,
    PROTOCOL_NUMBERS,
    SLOT_KEY,
    Action,
    action_of,
)
from narthex.proxy.plan.ir import Endpoint, Frontend, Plan, Sender, ServicePlan
from narthex.proxy.plan.sockets import socket_decision

_FAMILIES = {IPFamily.IPV4: AF_INET, IPFamily.IPV6: AF_INET6}
_REMEMBERED_ACTIONS = 256
_NO_ACTIONS = (Action.LEAVE, Action.LEAVE)


class MapWrites(msgspec.Struct, frozen=True):
    """Elements of one map to write and to delete."""

    keys: bytes = b""
    values: bytes = b""
    """Keys and values are joined, since the kernel takes them like this."""
    deleted: Sequence[bytes] = ()

    def __bool__(self) -> bool:
        return bool(self.keys or self.deleted)


class SocketChanges(msgspec.Struct, frozen=True, kw_only=True):
    """What to write, in this order: slots, counts, frontends; then what nothing leads to any more is deleted."""

    slots: MapWrites
    pools: MapWrites
    frontends: MapWrites

    def __bool__(self) -> bool:
        return bool(self.slots or self.pools or self.frontends)


class KernelRows(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the maps of a family, as it was read."""

    frontends: Mapping[bytes, bytes]
    counts: Mapping[int, int]
    """By the number of the pool; 0 is left out."""
    slots: Mapping[bytes, bytes]


_NO_FRONTENDS: Mapping[bytes, bytes] = {}


class CountedPort(msgspec.Struct, frozen=True, kw_only=True):
    """A Service port, and the endpoints whose connections are counted for it."""

    name: ServicePortName
    pools: tuple[bytes, ...]
    """Endpoints of each pool, joined."""
    place_size: int

    def has(self, place: bytes) -> bool:
        """Return True if the place, an address and a port as slots hold them, is an endpoint."""
        return any(_is_part(place, pool, self.place_size) for pool in self.pools)


class _ServiceRows:
    """The rows of one Service port."""

    __slots__ = ("frontends", "number", "pools", "service", "stored")

    def __init__(self, service: ServicePlan, number: int) -> None:
        self.service = service
        self.number = number
        self.frontends = _NO_FRONTENDS
        self.pools = [b"", b""]
        """Endpoints by slot, joined: of the cluster, and of this node."""
        self.stored: list[int] = [0, 0]
        """Slots of each pool that exist in the kernel; those behind the count are not used."""


class SocketRows:
    """The rows of one family. `advance` changes them in place."""

    def __init__(self, family: IPFamily, found: KernelRows | None = None) -> None:
        """Start with empty maps, or with what an earlier process has left in them."""
        self.family = family
        self._services: dict[ServicePortName, _ServiceRows] = {}
        self._pack_family = int(_FAMILIES[family])
        self._place_size = ADDRESS_SIZES[family] + 4
        self._actions: dict[tuple[object, ...], tuple[tuple[int, int], Frontend]] = {}
        self._free: list[int] = []
        self._next = 1
        self._lineage = 0
        self._detects_pods: bool | None = None
        self._found = _FoundRows(found) if found is not None else None
        self.frontend_count = self.slot_count = 0
        """Elements of the maps, with slots that are not used."""
        self.counts_open = False
        """Some Service port asks, or has asked, for the least connections, so that open ones must be counted."""
        if self._found is not None:
            self._next = self._found.next_number
            self.frontend_count, self.slot_count = len(self._found.frontends), len(self._found.slots)

    @property
    def service_count(self) -> int:
        """The highest number of a Service port, plus one."""
        return self._next

    def counted(self) -> Mapping[int, CountedPort]:
        """Return the Service ports whose connections are counted, by number."""
        return {
            rows.number: CountedPort(name=name, pools=tuple(rows.pools), place_size=self._place_size)
            for name, rows in self._services.items()
        }

    def is_served(self, name: ServicePortName) -> bool:
        """Return True if sockets know the Service port."""
        return name in self._services

    def advance(self, plan: Plan) -> SocketChanges:
        """Take over a plan, and return what to write."""
        changes = _Writer(self, self._place_size)
        known = self._services
        for name, service in self._differing(plan):
            rows = known.get(name)
            if service is None:
                if rows is not None:
                    changes.remove(rows)
                    del known[name]
                continue
            fronts = self._frontends(plan, service)
            if rows is None or (fronts and not rows.number):
                # Without frontends it has no number, and is remembered so that it is compared only when it changes.
                rows = known[name] = self._start(service, fronts) if fronts else _ServiceRows(service, 0)
            if rows.number:
                changes.bring(rows, service, fronts, self.pack)
            rows.service = service
        if self._found is not None:
            changes.forget(self._found)
            self._found = None
        self._lineage = plan.lineage.number
        self._free += changes.released
        return changes.done()

    def _differing(self, plan: Plan) -> Iterable[tuple[ServicePortName, ServicePlan | None]]:
        """Return the Service ports that may differ; all of them if it changed how pods are recognized."""
        services, known = plan.services, self._services
        if not known:
            self._detects_pods = plan.pods.enabled
            return services.items()
        if plan.pods.enabled is not self._detects_pods:
            self._detects_pods = plan.pods.enabled
            self._actions.clear()
            return [*services.items(), *((name, None) for name in known if name not in services)]
        return [(name, services.get(name)) for name in plan.differing(self._lineage, known)]

    def _start(self, service: ServicePlan, fronts: Mapping[bytes, tuple[int, int]]) -> _ServiceRows:
        """Return the rows of a Service port that is new, or that an earlier process knew."""
        rows = self._found.take(service, fronts) if self._found is not None else None
        if rows is None:
            if self._free:
                number = self._free.pop()
            else:
                number, self._next = self._next, self._next + 1
            rows = _ServiceRows(service, number)
        return rows

    def _frontends(self, plan: Plan, service: ServicePlan) -> dict[bytes, tuple[int, int]]:
        """Return the actions for pods and for the node by the key of each frontend; none without any action."""
        found = {}
        affinity = service.affinity_seconds is not None
        for front in service.frontends:
            if front.address is None or front.allow_from is not None:
                # Always left to the rules.
                continue
            # Few decisions exist, and plans share them: those that are the same object need no second thought.
            shared = id(front.pod), id(front.node), id(front.other), front.protocol, affinity, service.balancing
            held = self._actions.get(shared)
            if held is None:
                if len(self._actions) >= _REMEMBERED_ACTIONS:
                    self._actions.clear()
                pod, node = (
                    action_of(socket_decision(plan, service, front, sender)) for sender in (Sender.POD, Sender.NODE)
                )
                # The frontend keeps its decisions alive, so that no other object can have their identity.
                held = self._actions[shared] = (pod, node), front
                self.counts_open |= max(pod, node) >= LEAST_CONNECTIONS
            actions = held[0]
            if actions != _NO_ACTIONS:
                key = inet_pton(self._pack_family, front.address) + _PORTS[front.port][:2] + _PROTOCOLS[front.protocol]
                found[key] = actions
        return found

    def pack(self, endpoints: Sequence[Endpoint]) -> bytes:
        """Return the values of the slots of endpoints, joined. Called for every endpoint of a cluster at a start."""
        family = self._pack_family
        ports = {endpoint.port for endpoint in endpoints}
        if len(ports) == 1:
            port = _PORTS[ports.pop()]
            return port.join([inet_pton(family, endpoint.address) for endpoint in endpoints]) + port
        return b"".join([inet_pton(family, endpoint.address) + _PORTS[endpoint.port] for endpoint in endpoints])


class _Ports(dict[int, bytes]):
    """A port in network order, and two bytes more, by number."""

    def __missing__(self, port: int) -> bytes:
        made = self[port] = port.to_bytes(2, "big") + b"\0\0"
        return made


_PORTS = _Ports()
_PROTOCOLS = {protocol: bytes((number, 0)) for protocol, number in PROTOCOL_NUMBERS.items()}


class _Writer:
    """Collects the writes of one `advance`."""

    def __init__(self, rows: SocketRows, place_size: int) -> None:
        self._rows = rows
        self._size = place_size
        self._front_keys: list[bytes] = []
        self._front_values: list[bytes] = []
        self._front_deleted: list[bytes] = []
        self._slot_keys: list[bytes] = []
        self._slot_values: list[bytes] = []
        self._slot_deleted: list[bytes] = []
        self._pool_keys = array("I")
        self._pool_counts = array("I")
        self.released: list[int] = []
        """Numbers that may be used again by the next plan."""

    def bring(
        self,
        rows: _ServiceRows,
        service: ServicePlan,
        fronts: Mapping[bytes, tuple[int, int]],
        pack: Callable[[Sequence[Endpoint]], bytes],
    ) -> None:
        """Bring the rows of a Service port to its plan."""
        if not fronts:
            self.remove(rows)
            rows.number = 0
            return
        for index, pool in enumerate((service.cluster, service.local)):
            if pool is not None or rows.stored[index]:
                self._bring_pool(rows, index, pack(pool.endpoints) if pool is not None else b"")
        held, number = rows.frontends, rows.number
        desired = {key: FRONTEND_VALUE.pack(pod, node, 0, number) for key, (pod, node) in fronts.items()}
        if held == desired:
            return
        if held:
            for key, value in desired.items():
                if held.get(key) != value:
                    self._front_keys.append(key)
                    self._front_values.append(value)
            self._front_deleted += held.keys() - desired.keys()
        else:
            self._front_keys += desired
            self._front_values += desired.values()
        self._rows.frontend_count += len(desired) - len(held)
        rows.frontends = desired

    def _bring_pool(self, rows: _ServiceRows, index: int, desired: bytes) -> None:
        pool = 2 * rows.number + index
        held = rows.pools[index]
        if held == desired:
            return
        if not held:
            self._slot_keys.append(_keys_of(pool, len(desired) // self._size))
            self._slot_values.append(desired)
        else:
            desired = self._edit(pool, held, desired)
        rows.pools[index] = desired
        count = len(desired) // self._size
        if len(held) != len(desired):
            self._pool_keys.append(pool)
            self._pool_counts.append(count)
        if count > rows.stored[index]:
            self._rows.slot_count += count - rows.stored[index]
            rows.stored[index] = count

    def _edit(self, pool: int, before: bytes, after: bytes) -> bytes:
        """Change as few slots as possible, and return them.

        What is new takes the place of what is gone, and the last endpoints fill the rest.
        """
        held, desired = split(before, self._size), split(after, self._size)
        missing = dict.fromkeys(desired)
        holes: set[int] = set()
        for slot, endpoint in enumerate(held):
            # An endpoint that appears twice was being moved when a process ended.
            if endpoint in missing:
                del missing[endpoint]
            else:
                holes.add(slot)
        for endpoint in missing:
            if holes:
                self._write(pool, held, holes.pop(), endpoint)
            else:
                held.append(endpoint)
                self._write(pool, held, len(held) - 1, endpoint)
        size = len(held) - len(holes)
        movable = [slot for slot in range(size, len(held)) if slot not in holes]
        for slot in holes:
            if slot < size:
                self._write(pool, held, slot, held[movable.pop()])
        return b"".join(held[:size])

    def _write(self, pool: int, held: list[bytes], slot: int, endpoint: bytes) -> None:
        held[slot] = endpoint
        self._slot_keys.append(SLOT_KEY.pack(slot, pool))
        self._slot_values.append(endpoint)

    def remove(self, rows: _ServiceRows) -> None:
        """Remove the rows of a Service port."""
        if not rows.number:
            return
        self._front_deleted += rows.frontends
        self._rows.frontend_count -= len(rows.frontends)
        rows.frontends = {}
        for index in (0, 1):
            pool = 2 * rows.number + index
            if rows.pools[index]:
                self._pool_keys.append(pool)
                self._pool_counts.append(0)
                rows.pools[index] = b""
            self._slot_deleted += [SLOT_KEY.pack(slot, pool) for slot in range(rows.stored[index])]
            self._rows.slot_count -= rows.stored[index]
            rows.stored[index] = 0
        self.released.append(rows.number)

    def forget(self, found: _FoundRows) -> None:
        """Delete what an earlier process has left and no Service port of the plan uses."""
        self._front_deleted += found.frontends
        self._rows.frontend_count -= len(found.frontends)
        self._slot_deleted += found.slots
        self._rows.slot_count -= len(found.slots)
        self._pool_keys.extend(found.counts)
        self._pool_counts.extend([0] * len(found.counts))

    def done(self) -> SocketChanges:
        """Return the writes."""
        written = set(self._front_keys)
        deleted = [key for key in self._front_deleted if key not in written]
        return SocketChanges(
            slots=MapWrites(b"".join(self._slot_keys), b"".join(self._slot_values), self._slot_deleted),
            pools=MapWrites(self._pool_keys.tobytes(), self._pool_counts.tobytes()),
            frontends=MapWrites(b"".join(self._front_keys), b"".join(self._front_values), deleted),
        )


def _keys_of(pool: int, count: int) -> bytes:
    """Return the keys of the first `count` slots of a pool, joined. One join costs a third of packing each key."""
    while len(_INDEXES) < count:
        _INDEXES.append(len(_INDEXES).to_bytes(4, sys.byteorder))
    number = pool.to_bytes(4, sys.byteorder)
    return number.join(_INDEXES[:count]) + number if count else b""


_INDEXES: list[bytes] = []
"""Words of the indexes of slots, for the largest pool so far."""


def split(data: bytes, size: int) -> list[bytes]:
    """Return the parts of joined keys or values."""
    return [data[start : start + size] for start in range(0, len(data), size)]


def _is_part(part: bytes, data: bytes, size: int) -> bool:
    at = data.find(part)
    while at > 0 and at % size:
        at = data.find(part, at + 1)
    return at >= 0


class _FoundRows:
    """What an earlier process has left, without what was taken over."""

    def __init__(self, found: KernelRows) -> None:
        self.frontends = dict(found.frontends)
        self.counts = dict(found.counts)
        self.slots: set[bytes] = set(found.slots)
        self._values = found.slots
        self._taken: set[int] = set()
        numbers = [FRONTEND_VALUE.unpack(value)[3] for value in self.frontends.values()]
        pools = [SLOT_KEY.unpack(key)[1] for key in self.slots]
        self.next_number = max([0, *numbers, *(pool // 2 for pool in (*pools, *self.counts))]) + 1

    def take(self, service: ServicePlan, keys: Iterable[bytes]) -> _ServiceRows | None:
        """Return the rows that were found for a Service port, by one of its frontends; None if there are none."""
        keys = list(keys)
        number = next((FRONTEND_VALUE.unpack(self.frontends[key])[3] for key in keys if key in self.frontends), 0)
        if not number or number in self._taken:
            return None
        self._taken.add(number)
        rows = _ServiceRows(service, number)
        rows.frontends = {key: self.frontends.pop(key) for key in keys if key in self.frontends}
        for index in (0, 1):
            self._take_pool(rows, index)
        return rows

    def _take_pool(self, rows: _ServiceRows, index: int) -> None:
        pool = 2 * rows.number + index
        count = self.counts.pop(pool, 0)
        size = len(next(iter(self._values.values()), b""))
        slot = 0
        # A slot that is missing counts as one with another endpoint.
        while slot < count or SLOT_KEY.pack(slot, pool) in self.slots:
            key = SLOT_KEY.pack(slot, pool)
            self.slots.discard(key)
            if slot < count:
                rows.pools[index] += self._values.get(key, bytes(size))
            slot += 1
        rows.stored[index] = slot
