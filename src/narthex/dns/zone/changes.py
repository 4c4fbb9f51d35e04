"""Computes which names change when objects of the cluster change. Services without changes cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from narthex.dns.corefile.settings import KubernetesSettings
from narthex.dns.message.names import label
from narthex.dns.zone.records import ServiceRecords, packed, service_key, service_records
from narthex.model import EndpointSlice, Namespace, NamespacedName, Pod, Service, Slices, Snapshot
from narthex.model.selector import matches

_NO_SLICES = Slices()


class ZoneChange(msgspec.Struct, frozen=True, array_like=True):
    """The difference between two states of a zone. Values of None and False stand for removal."""

    services: dict[bytes, ServiceRecords | None] = {}
    """By `NAME.NAMESPACE.svc`; see `service_key`."""
    namespaces: dict[bytes, bool] = {}
    """By label."""
    pods: dict[bytes, tuple[bytes, ...]] = {}
    """Namespaces (labels) of the pods with a packed address, with `pods verified` only; empty: no pod has it."""
    serial: int = 0
    """Unix time of the last change of a Service or an endpoint (row D29)."""
    synced: bool = False

    def __bool__(self) -> bool:
        return bool(self.services or self.namespaces or self.pods)


class ZoneTracker:
    """Tracks the names of one `kubernetes` section across snapshots."""

    def __init__(
        self,
        settings: KubernetesSettings,
        build: Callable[..., ServiceRecords | None] = service_records,
        *,
        lists_namespaces: bool = False,
    ) -> None:
        """`build` builds the records of one Service.

        With `lists_namespaces`, the source knows all Namespaces, so that a Service without its Namespace does not exist.
        """
        self._settings = settings
        self._lists_namespaces = lists_namespaces
        self._follows_namespaces = bool(settings.namespace_labels)
        """Whether a namespace, and thus its Services, exists only while its object does."""
        self._build = build
        self._before = Snapshot()
        self._records: dict[NamespacedName, ServiceRecords] = {}
        self._selected: frozenset[str] = frozenset()
        """Namespace objects that the settings select."""
        self._populated: dict[str, set[str]] = {}
        """Names of all Services by namespace, selected or not."""
        self._namespaces: frozenset[str] = frozenset()
        """Namespaces whose names exist."""
        self._pods: dict[NamespacedName, tuple[bytes, ...]] = {}
        self._pods_by_address: dict[bytes, dict[NamespacedName, None]] = {}
        self._serial = 0

    def whole(self) -> ZoneChange:
        """Return the whole zone as a change, for a new worker."""
        return ZoneChange(
            services={service_key(*key): records for key, records in self._records.items()},
            namespaces={label(name): True for name in self._namespaces},
            pods={address: self._namespaces_of(address) for address in self._pods_by_address},
            serial=self._serial,
            synced=self._before.synced,
        )

    def update(
        self, snapshot: Snapshot, services: Collection[NamespacedName], pods: Collection[NamespacedName], now: int
    ) -> ZoneChange:
        """Return the change since the last call.

        `services` and `pods` name all objects that may have changed; `now` is the Unix time.
        """
        before, self._before = self._before, snapshot
        self._update_populated(snapshot, services)
        if snapshot.namespaces is not before.namespaces:
            if self._lists_namespaces and not self._follows_namespaces and snapshot.namespaces:
                # Only now, so that an API server that lists no Namespace serves the names of its Services.
                self._follows_namespaces = True
                services = {*services, *snapshot.services}
            self._selected = frozenset(
                key.name for key, namespace in snapshot.namespaces.items() if self._selects_namespace(namespace)
            )
        changed_namespaces = self._update_namespaces()
        if changed_namespaces and self._follows_namespaces:
            # The Services of a namespace appear and vanish with it.
            services = {*services, *(key for key in snapshot.services if key.namespace in changed_namespaces)}
        changed: dict[bytes, ServiceRecords | None] = {}
        for key in services:
            self._update_service(snapshot, key, changed)
        if changed or not self._serial:
            self._serial = now
        return ZoneChange(
            services=changed,
            namespaces={label(name): exists for name, exists in changed_namespaces.items()},
            pods=self._update_pods(snapshot, pods),
            serial=self._serial,
            synced=snapshot.synced,
        )

    def _update_service(
        self, snapshot: Snapshot, key: NamespacedName, changed: dict[bytes, ServiceRecords | None]
    ) -> None:
        service = snapshot.services.get(key)
        records = None
        if service is not None and self._selects(service):
            slices = snapshot.slices.get(key, _NO_SLICES)
            used = [each for each in slices.values() if self._matches(each)] if self._settings.endpoints else []
            records = self._build(
                service,
                used,
                pod_names=self._settings.endpoint_pod_names,
                ignore_empty=self._settings.ignore_empty_service,
                zonal=self._settings.zonal,
            )
        if records == self._records.get(key):
            return
        changed[service_key(*key)] = records
        if records is None:
            del self._records[key]
        else:
            self._records[key] = records

    def _matches(self, obj: Service | EndpointSlice) -> bool:
        return not self._settings.labels or matches(dict(obj.labels), self._settings.labels)

    def _selects(self, service: Service) -> bool:
        if self._settings.namespaces and service.namespace not in self._settings.namespaces:
            return False
        if self._follows_namespaces and service.namespace not in self._namespaces:
            return False
        return self._matches(service)

    def _selects_namespace(self, namespace: Namespace) -> bool:
        if self._settings.namespaces and namespace.name not in self._settings.namespaces:
            return False
        return not self._settings.namespace_labels or matches(dict(namespace.labels), self._settings.namespace_labels)

    def _update_populated(self, snapshot: Snapshot, services: Collection[NamespacedName]) -> None:
        for key in services:
            if key in snapshot.services:
                self._populated.setdefault(key.namespace, set()).add(key.name)
            elif key.namespace in self._populated:
                self._populated[key.namespace].discard(key.name)
                if not self._populated[key.namespace]:
                    del self._populated[key.namespace]

    def _update_namespaces(self) -> dict[str, bool]:
        """Return the namespaces that have appeared (True) or vanished (False).

        Manifests rarely contain Namespace objects, so a namespace also exists if it contains a Service.
        """
        existing = set(self._selected)
        if not self._follows_namespaces:
            existing |= self._populated.keys() & set(self._settings.namespaces or self._populated)
        changed = {name: name in existing for name in existing ^ self._namespaces}
        self._namespaces = frozenset(existing)
        return changed

    def _update_pods(self, snapshot: Snapshot, pods: Collection[NamespacedName]) -> dict[bytes, tuple[bytes, ...]]:
        if self._settings.pods != "verified":
            return {}
        touched: set[bytes] = set()
        for key in pods:
            before = self._pods.pop(key, ())
            after = self._pod_addresses(snapshot.pods.get(key), bool(before))
            for address in set(before) - set(after):
                self._pods_by_address[address].pop(key, None)
                if not self._pods_by_address[address]:
                    del self._pods_by_address[address]
            for address in after:
                self._pods_by_address.setdefault(address, {})[key] = None
            if after:
                self._pods[key] = after
            touched |= set(before) ^ set(after)
        return {address: self._namespaces_of(address) for address in touched}

    def _namespaces_of(self, address: bytes) -> tuple[bytes, ...]:
        return tuple(sorted({label(key.namespace) for key in self._pods_by_address.get(address, ())}))

    def _pod_addresses(self, pod: Pod | None, known: bool) -> tuple[bytes, ...]:
        """Return the addresses of a pod; none if it is first seen while it is being deleted (row D24)."""
        if pod is None or pod.phase in ("Succeeded", "Failed", "Unknown") or (pod.deletion_timestamp and not known):
            return ()
        if self._settings.namespaces and pod.namespace not in self._settings.namespaces:
            return ()
        return tuple(packed(ip) for ip in pod.ips)
