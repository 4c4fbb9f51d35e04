"""The objects of an external API server, in the form of the lab's own Registry.

Kubelets, static pods, and manifests use a Registry, wherever the objects are. Here reads come from a copy that follows the server
(`kube/source.py`), and writes are requests. A write returns once the copy has it, so that a caller reads what it has written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any, Unpack, cast
from urllib.parse import urlencode

import msgspec

from narthex.kube.messages import WATCH_TIMES, is_older
from narthex.kube.resources import WatchedResource
from narthex.kube.source import KubeSource
from narthex.lab.api.api import error_response
from narthex.lab.api.errors import StatusError
from narthex.lab.api.kinds import KINDS, ApiResource, group_version
from narthex.lab.api.registry import DeleteOptions, Registry
from narthex.lab.api.requests import JSON, ApiRequest, ApiResponse
from narthex.lab.api.store import Raw
from narthex.lab.controllers.node_lifecycle import LEASES
from narthex.lab.program.remote_client import RAW_OBJECTS, RemoteClient, discovered_resources
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import LabError
from narthex.linux.namespaces import in_namespace
from narthex.model import AnyObject, Delete, Event, NamespacedName, Upsert
from narthex.model.backoff import Backoff
from narthex.model.decode.objects import Decoded

COPIED = (
    "ConfigMap",
    "CustomResourceDefinition",
    "Deployment",
    "EndpointSlice",
    "Ingress",
    "IngressClass",
    "Lease",
    "Namespace",
    "Node",
    "Pod",
    "Secret",
    "Service",
    "ServiceCIDR",
)
"""Built-in kinds that parts of a lab read often, or follow. All others are read at the server."""
_SEEN_SECONDS = 2.0
"""Time for a change to arrive in the copy, which takes milliseconds. Later the caller goes on without."""
_SYNC_SECONDS = 60.0
_GATHER_SECONDS = 0.005
"""Changes within this time are handled together, as with the embedded API."""
_TIMES = msgspec.structs.replace(WATCH_TIMES, backoff=Backoff(0.2, 1.0))
"""A lab's nodes must not stay behind for long after its API server was away, and they load no other machine."""
_STRATEGIC = "application/strategic-merge-patch+json"


class CopiedObject(msgspec.Struct, frozen=True):
    """An object as the server has sent it, in the place of an object of the model."""

    kind: str
    key: NamespacedName
    raw: dict[str, Any]


class RemoteRegistry(Registry):
    """A Registry over an API server. `unlocked` releases the caller's lock while a request is under way."""

    def __init__(self, client: RemoteClient, unlocked: Callable[[], AbstractContextManager[None]]) -> None:
        self._client = client
        self._unlocked = unlocked
        self._arrived = threading.Condition()
        self._copied = {*COPIED}
        """Names of kinds with a copy."""
        super().__init__(lambda: datetime.now(UTC), os.urandom)

    def get(self, kind: str, namespace: str, name: str) -> Raw | None:
        """Return an object, None if it does not exist. Raises StatusError if the server must be asked, and fails."""
        of = self._kind(kind)
        if of.name in self._copied:
            return super().get(of.name, namespace, name)
        try:
            return self._request("GET", _path(of, namespace, name))
        except StatusError as error:
            if error.code == 404:
                return None
            raise

    def list(self, kind: str, namespace: str = "") -> list[Raw]:
        """Return a kind's objects of all namespaces or one. Raises StatusError if the server must be asked, and fails."""
        of = self._kind(kind) if kind in self.kinds else None
        if of is None or of.name in self._copied:
            return super().list(kind, namespace)
        found = self._request("GET", _path(of, namespace, ""))
        return [{"apiVersion": of.api_version, "kind": of.kind, **each} for each in found.get("items") or ()]

    def create(self, kind: str, obj: Mapping[str, Any], *, dry_run: bool = False) -> Raw:
        """Create an object and return it as stored. Raises StatusError."""
        of = self._kind(kind)
        body = {"apiVersion": of.api_version, "kind": of.kind, **obj}
        path = _path(of, str(obj["metadata"].get("namespace") or ""), "")
        made = self._request("POST", path + _dry(dry_run), body)
        if not dry_run:
            self._await(of, made["metadata"], lambda held: held is not None)
        return made

    def update(self, kind: str, obj: Mapping[str, Any], *, subresource: str = "", dry_run: bool = False) -> Raw:
        """Write an object, or the changed fields of its status, and return it as stored. Raises StatusError."""
        of = self._kind(kind)
        meta = obj["metadata"]
        path = _path(of, str(meta.get("namespace") or ""), str(meta["name"]), subresource) + _dry(dry_run)
        if subresource == "status":
            held = self.get(kind, str(meta.get("namespace") or ""), str(meta["name"])) or {}
            change = status_patch(held.get("status") or {}, obj.get("status") or {})
            if not change:
                return held
            patch = {"metadata": {"uid": meta["uid"]}, "status": change}
            written = self._request("PATCH", path, patch, _STRATEGIC)
        else:
            written = self._request("PUT", path, {"apiVersion": of.api_version, "kind": of.kind, **obj})
        if dry_run:
            return written
        version = written["metadata"]["resourceVersion"]
        self._await(of, written["metadata"], lambda held: held is None or not is_older(_version(held), version))
        return written

    def delete(self, kind: str, namespace: str, name: str, **options: Unpack[DeleteOptions]) -> Raw | None:
        """Delete an object. Return it if it still exists, otherwise None. Raises StatusError."""
        of = self._kind(kind)
        dry_run = options.get("dry_run", False)
        fields = {
            "gracePeriodSeconds": options.get("grace"),
            "preconditions": options.get("preconditions") or None,
            "propagationPolicy": options.get("propagation"),
            "dryRun": ["All"] if dry_run else None,
        }
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            **{field: value for field, value in fields.items() if value is not None},
        }
        self._request("DELETE", _path(of, namespace, name), body)
        if of.name in self._copied and not dry_run:
            self._wait(
                lambda: (held := super(RemoteRegistry, self).get(of.name, namespace, name)) is None or _ending(held)
            )
        held = self.get(kind, namespace, name)
        return held if held is not None and _ending(held) else None

    def token(self, namespace: str, account: str, pod: Mapping[str, Any], source: Mapping[str, Any]) -> str:
        """Return a token of a service account for a pod (`serviceAccountToken` of a projected volume). Raises StatusError."""
        seconds = int(source.get("expirationSeconds") or 3600)
        bound = {"apiVersion": "v1", "kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        audiences = [source["audience"]] if source.get("audience") else []
        spec = {"audiences": audiences, "expirationSeconds": seconds, "boundObjectRef": bound}
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"{_path(KINDS['ServiceAccount'], namespace, account)}/token"
        return str(self._request("POST", path, request)["status"]["token"])

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events of the server to the copy. The caller holds the lock."""
        for event in events:
            if isinstance(event, Upsert):
                item = cast(CopiedObject, event.object)
                self.store.put(item.kind, item.raw, copied=True)
                self._changed_kinds(item.kind)
            elif isinstance(event, Delete):
                self.store.delete(event.kind, *event.key)
                self._changed_kinds(event.kind)
        with self._arrived:
            self._arrived.notify_all()

    def define(self, definitions: Iterable[Mapping[str, Any]]) -> None:
        """Create CustomResourceDefinitions that do not exist, wait until they are served, and copy their objects from now on."""
        for definition in definitions:
            path = _path(KINDS["CustomResourceDefinition"], "", "")
            try:
                self._client.object("POST", path, definition)
            except StatusError as error:
                if error.reason != "AlreadyExists":
                    raise
            self._copied.add(f"{definition['spec']['names']['kind']}.{definition['spec']['group']}")
            served = _list_path(definition)
            deadline = time.monotonic() + _SYNC_SECONDS
            while self._client.request("GET", served).status != 200:
                if time.monotonic() > deadline:
                    raise LabError(f"the API server does not serve {served} after {_SYNC_SECONDS:.0f} s")
                time.sleep(0.1)

    def discover(self) -> None:
        """Learn which other kinds the server has. Raises StatusError."""
        found = list(discovered_resources(self._client))
        known = {(each.kind, each.group) for each in KINDS.values()}
        others = {each.name: each for each in found if (each.kind, each.group) not in known and each.name not in KINDS}
        self.built_in = {**KINDS, **others}
        self._changed_kinds()

    def _request(self, method: str, path: str, body: object = None, content_type: str = JSON) -> Raw:
        with self._unlocked():
            return self._client.object(method, path, body, content_type)

    def _await(self, of: ApiResource, meta: Mapping[str, Any], arrived: Callable[[Raw | None], bool]) -> None:
        """Wait until the copy has a change."""
        if of.name in self._copied:
            key = str(meta.get("namespace") or ""), str(meta["name"])
            self._wait(lambda: arrived(super(RemoteRegistry, self).get(of.name, *key)))

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._unlocked(), self._arrived:
            self._arrived.wait_for(done, _SEEN_SECONDS)


class RemoteApi:
    """Answers requests as an `ApiHandler` does, by those of the API server."""

    def __init__(self, client: RemoteClient, unlocked: Callable[[], AbstractContextManager[None]]) -> None:
        self._client = client
        self._unlocked = unlocked

    def answer(self, request: ApiRequest) -> ApiResponse:
        """Return the server's response; an error without one."""
        query = f"?{urlencode(request.repeated)}" if request.repeated else ""
        content_type = request.headers.get("content-type", JSON)
        try:
            with self._unlocked():
                return self._client.request(request.method, request.path + query, request.body or None, content_type)
        except StatusError as error:
            return error_response(error)


class RemoteObjects:
    """The shared registry of a lab with an external control plane, and the threads that keep it up to date."""

    def __init__(self, namespace: str | None, kubeconfig: str, definitions: Iterable[Mapping[str, Any]]) -> None:
        """Prepare the registry.

        `namespace` is the network namespace to send requests from; None: the present one. `definitions` are
        CustomResourceDefinitions that the lab needs.
        """
        self._stop = threading.Event()
        self._following: threading.Thread | None = None
        self._definitions = tuple(definitions)
        self.client = RemoteClient(namespace, kubeconfig)
        self.registry = RemoteRegistry(self.client, lambda: self.shared.released())
        self.shared = SharedRegistry(self.registry)
        self.api = RemoteApi(self.client, self.shared.released)

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        if self._following is not None:
            self._following.join()
        self.client.close()

    def connect(self) -> None:
        """Follow the server; return once all lists are there. Raises LabError or StatusError."""
        self.client.start()
        self.registry.define(self._definitions)
        self.registry.discover()
        kinds = [KINDS[name] for name in COPIED]
        resources = [_watched(each.name, each.kind, each.api_version, _list_path_of(each)) for each in kinds]
        for each in self._definitions:
            spec = each["spec"]
            name, version = f"{spec['names']['kind']}.{spec['group']}", spec["versions"][0]["name"]
            resources.append(
                _watched(name, spec["names"]["kind"], group_version(spec["group"], version), _list_path(each))
            )
        source = KubeSource(self.client.access, resources, times=_TIMES, newest=True, gather=_GATHER_SECONDS)
        synced = threading.Event()

        def follow() -> None:
            """Apply the changes of the source to the registry until `stop`; the first ones complete the start."""
            with in_namespace(self.client.namespace):
                for events in source.changes(self._stop):
                    with self.shared.held():
                        self.registry.apply(events)
                    if events:
                        synced.set()

        self._following = threading.Thread(target=follow, name="api-follow", daemon=True)
        self._following.start()
        if not synced.wait(_SYNC_SECONDS):
            why = "; ".join(each.message for each in source.problems)
            raise LabError(f"the objects of the API server did not arrive within {_SYNC_SECONDS:.0f} s: {why}")


def status_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the strategic merge patch between two statuses: changed fields, and conditions that differ.

    The server merges conditions by type, so that those of other writers stay.
    """
    change: dict[str, Any] = {name: value for name, value in after.items() if value != before.get(name)}
    change |= {name: None for name in before if name not in after}
    if change.get("conditions"):
        held = before.get("conditions") or ()
        change["conditions"] = [each for each in change["conditions"] if each not in held]
        if not change["conditions"]:
            del change["conditions"]
    return change


def _dry(run: bool) -> str:
    return "?dryRun=All" if run else ""


def _ending(held: Mapping[str, Any]) -> bool:
    return bool(held["metadata"].get("deletionTimestamp"))


def _version(held: Mapping[str, Any]) -> str:
    return str(held["metadata"]["resourceVersion"])


def _path(of: ApiResource, namespace: str, name: str, subresource: str = "") -> str:
    parts = ["apis" if of.group else "api", of.api_version]
    parts += ["namespaces", namespace] if of.namespaced and namespace else []
    return "/".join(["", *parts, of.plural, *filter(None, (name, subresource))])


def _list_path_of(of: ApiResource) -> str:
    return _path(of, LEASES if of.name == "Lease" else "", "")


def _list_path(definition: Mapping[str, Any]) -> str:
    spec = definition["spec"]
    return f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"


def _watched(name: str, kind: str, api_version: str, path: str) -> WatchedResource:
    def decode(data: msgspec.Raw) -> Decoded:
        """Decode an item of a list or watch, with its kind and API version."""
        # Lists leave out kind and version of their items.
        raw = {**RAW_OBJECTS.decode(data), "apiVersion": api_version, "kind": kind}
        meta = raw["metadata"]
        key = NamespacedName(meta.get("namespace") or "", meta["name"])
        return Decoded(cast(AnyObject, CopiedObject(name, key, raw)), (), (name, key))

    return WatchedResource(kind=name, paths=(path,), decode=decode)
