"""What of the names changes when objects do. Services that nothing happened to are not looked at."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from narthex.dns.corefile.settings import Kubernetes
from narthex.dns.zone.records import Entry, entry, label, packed, service_key
from narthex.model.names import NamespacedName
from narthex.model.objects import EndpointSlice, Namespace, Pod, Service
from narthex.model.selector import matches
from narthex.model.store import Slices, Snapshot

_NO_SLICES = Slices()


class Change(msgspec.Struct, frozen=True, array_like=True):
    """What a served zone has to take over. `None` and False: no longer there."""

    services: dict[bytes, Entry | None] = {}
    """By `NAME.NAMESPACE.svc`, see `records.service_key`."""
    namespaces: dict[bytes, bool] = {}
    """By label."""
    pods: dict[bytes, tuple[bytes, ...]] = {}
    """Namespaces (labels) by packed address; none: the address is free. With `pods verified` only."""
    serial: int = 0
    """Seconds since 1970 of the last change of a Service or an endpoint (row D29)."""
    synced: bool = False

    def __bool__(self) -> bool:
        return bool(self.services or self.namespaces or self.pods)


class Recorder:
    """Follows one `kubernetes` section."""

    def __init__(self, settings: Kubernetes, make: Callable[..., Entry | None] = entry) -> None:
        self._settings = settings
        self._make = make
        self._before = Snapshot()
        self._entries: dict[NamespacedName, Entry] = {}
        self._named: frozenset[str] = frozenset()
        """Namespaces that are objects and are shown."""
        self._populated: dict[str, set[str]] = {}
        """Services by namespace, shown or not."""
        self._namespaces: frozenset[str] = frozenset()
        self._pods: dict[NamespacedName, tuple[bytes, ...]] = {}
        self._owners: dict[bytes, dict[NamespacedName, None]] = {}
        self._serial = 0

    def whole(self) -> Change:
        """Everything, for a process that knows nothing yet."""
        return Change(
            services={service_key(*key): made for key, made in self._entries.items()},
            namespaces={label(name): True for name in self._namespaces},
            pods={address: self._holders(address) for address in self._owners},
            serial=self._serial,
            synced=self._before.synced,
        )

    def update(
        self, snapshot: Snapshot, services: Collection[NamespacedName], pods: Collection[NamespacedName], now: int
    ) -> Change:
        """What differs from the last call. `services` and `pods` name all that may; `now` is seconds since 1970."""
        before, self._before = self._before, snapshot
        self._count(snapshot, services)
        if snapshot.namespaces is not before.namespaces:
            self._named = frozenset(key.name for key, obj in snapshot.namespaces.items() if self._shown_namespace(obj))
        changed_namespaces = self._update_namespaces()
        if changed_namespaces and self._settings.namespace_labels:
            # A namespace that comes into view brings its Services.
            services = {*services, *(key for key in snapshot.services if key.namespace in changed_namespaces)}
        entries: dict[bytes, Entry | None] = {}
        for key in services:
            self._update_service(snapshot, key, entries)
        if entries or not self._serial:
            self._serial = now
        return Change(
            services=entries,
            namespaces={label(name): shown for name, shown in changed_namespaces.items()},
            pods=self._update_pods(snapshot, pods),
            serial=self._serial,
            synced=snapshot.synced,
        )

    def _update_service(self, snapshot: Snapshot, key: NamespacedName, changed: dict[bytes, Entry | None]) -> None:
        service = snapshot.services.get(key)
        made = None
        if service is not None and self._shows(service):
            slices = snapshot.slices.get(key, _NO_SLICES)
            held = [each for each in slices.values() if self._takes(each)] if self._settings.endpoints else []
            made = self._make(
                service,
                held,
                pod_names=self._settings.endpoint_pod_names,
                ignore_empty=self._settings.ignore_empty_service,
            )
        if made == self._entries.get(key):
            return
        changed[service_key(*key)] = made
        if made is None:
            del self._entries[key]
        else:
            self._entries[key] = made

    def _takes(self, obj: Service | EndpointSlice) -> bool:
        return not self._settings.labels or matches(dict(obj.labels), self._settings.labels)

    def _shows(self, service: Service) -> bool:
        """Whether the selection lets it in (row S19)."""
        if self._settings.namespaces and service.namespace not in self._settings.namespaces:
            return False
        if self._settings.namespace_labels and service.namespace not in self._namespaces:
            return False
        return self._takes(service)

    def _shown_namespace(self, obj: Namespace) -> bool:
        if self._settings.namespaces and obj.name not in self._settings.namespaces:
            return False
        return not self._settings.namespace_labels or matches(dict(obj.labels), self._settings.namespace_labels)

    def _count(self, snapshot: Snapshot, services: Collection[NamespacedName]) -> None:
        for key in services:
            if key in snapshot.services:
                self._populated.setdefault(key.namespace, set()).add(key.name)
            elif key.namespace in self._populated:
                self._populated[key.namespace].discard(key.name)
                if not self._populated[key.namespace]:
                    del self._populated[key.namespace]

    def _update_namespaces(self) -> dict[str, bool]:
        """Manifests name their namespaces seldom; one in which a Service stands is there all the same."""
        shown = set(self._named)
        if not self._settings.namespace_labels:
            shown |= self._populated.keys() & set(self._settings.namespaces or self._populated)
        changed = {name: name in shown for name in shown ^ self._namespaces}
        self._namespaces = frozenset(shown)
        return changed

    def _update_pods(self, snapshot: Snapshot, pods: Collection[NamespacedName]) -> dict[bytes, tuple[bytes, ...]]:
        if self._settings.pods != "verified":
            return {}
        touched: set[bytes] = set()
        for key in pods:
            held = self._pods.pop(key, ())
            now = self._pod_addresses(snapshot.pods.get(key), bool(held))
            for address in set(held) - set(now):
                self._owners[address].pop(key, None)
                if not self._owners[address]:
                    del self._owners[address]
            for address in now:
                self._owners.setdefault(address, {})[key] = None
            if now:
                self._pods[key] = now
            touched |= set(held) ^ set(now)
        return {address: self._holders(address) for address in touched}

    def _holders(self, address: bytes) -> tuple[bytes, ...]:
        return tuple(sorted({label(key.namespace) for key in self._owners.get(address, ())}))

    def _pod_addresses(self, pod: Pod | None, known: bool) -> tuple[bytes, ...]:
        """One first seen while it is being deleted is not taken in (row D24)."""
        if pod is None or pod.phase in ("Succeeded", "Failed", "Unknown") or (pod.deletion_timestamp and not known):
            return ()
        if self._settings.namespaces and pod.namespace not in self._settings.namespaces:
            return ()
        return tuple(packed(ip) for ip in pod.ips)
