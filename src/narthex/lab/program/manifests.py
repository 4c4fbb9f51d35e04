"""Server-side apply of the user's manifests, which are watched for changes, and the machine's programs that they run.

Objects that disappear from the files are deleted. Errors are reported with file and line and retried; the other objects
are applied regardless.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from narthex.kube.manifests import ManifestSource
from narthex.lab.api.api import ApiHandler
from narthex.lab.api.kinds import ApiResource
from narthex.lab.api.requests import ApiRequest, ApiResponse
from narthex.lab.cluster import namespace
from narthex.lab.kubelet.environment import command_line
from narthex.lab.kubelet.program.images import ECHO, Images
from narthex.lab.program.remote_registry import RemoteApi
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.model import AnyObject, Delete, NamespacedName, Object, Problem, Synced, Upsert
from narthex.model.decode.objects import KINDS, Decoded, Identity, decode
from narthex.runtime.files import replace_file

MANAGER = "manifests"
"""Field manager of objects from manifests."""

_APPLY_FIRST = ("Namespace", "CustomResourceDefinition", "ConfigMap", "Secret")
"""Kinds that other objects depend on."""
_SERVER_FIELDS = (
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "generation",
    "managedFields",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)
"""Metadata that only a server writes; exported manifests contain them."""


class ManifestObject(Object, frozen=True, kw_only=True):
    """An object of any kind as a manifest defines it."""

    kind: str
    api_version: str
    raw: dict[str, Any]

    @property
    def title(self) -> str:
        """Kind and key, for messages."""
        return f"{self.kind} {self.key}"


def decode_document(raw: Any, origin: str = "", locate: Callable[[str], str] | None = None) -> Decoded:
    """Decode one document. Kinds of the model are validated here, since the API's errors have no line numbers."""
    if not isinstance(raw, dict):
        return _refused(origin, "", "is not a Kubernetes object: apiVersion, kind, metadata, ...")
    kind, version, meta = raw.get("kind"), raw.get("apiVersion"), raw.get("metadata")
    if not isinstance(kind, str) or not isinstance(version, str) or not kind or not version:
        return _refused(origin, "", "apiVersion and kind are required: a Kubernetes object has them, and metadata")
    name = meta.get("name") if isinstance(meta, dict) else None
    if not isinstance(name, str) or not name or not isinstance(meta, dict):
        return _refused(origin, kind, "metadata.name is required")
    if kind in KINDS and kind not in ("Pod", "Deployment"):
        read = decode(raw, origin, locate)
        if any(problem.severity == "error" for problem in read.problems):
            return Decoded(None, read.problems, read.identity)
    target_namespace = meta.get("namespace")
    made = ManifestObject(
        name=name,
        namespace=target_namespace if isinstance(target_namespace, str) else "",
        origin=origin,
        kind=kind,
        api_version=version,
        raw=raw,
    )
    return Decoded(cast(AnyObject, made), (), (kind, made.key))


def _refused(origin: str, label: str, message: str) -> Decoded:
    return Decoded(None, (Problem(origin=origin, object=label, message=message),))


class ManifestApplier:
    """Keeps the API's objects in line with the manifests. Used by one thread."""

    def __init__(
        self,
        source: Path,
        registry: SharedRegistry,
        api: ApiHandler | RemoteApi,
        nodes: tuple[str, ...],
        record_file: Path | None = None,
    ) -> None:
        """Create an applier.

        Args:
            source: File or directory of manifests.
            registry: The registry behind `api`.
            api: The API that objects are applied to.
            nodes: Names of the lab's nodes.
            record_file: Remembers the applied objects for the next lab; None keeps nothing.
        """
        self._record_file = record_file
        self._source = ManifestSource(source, decode_document)
        self._registry = registry
        self._api = api
        self._nodes = nodes
        self._desired: dict[Identity, ManifestObject] = {}
        self._scanned = False
        """The files have been read at least once."""
        self._pending: set[Identity] = set()
        self._applied: dict[Identity, ManifestObject] = _load_applied(record_file)
        self._unconfirmed = set(self._applied)
        """Applied by an earlier lab, and not found in the files yet."""
        self._object_problems: dict[Identity, Problem] = {}

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All current errors of the manifests."""
        return (
            *self._source.problems,
            *(fault for _, fault in sorted(self._object_problems.items(), key=lambda each: each[1].origin)),
        )

    @property
    def pending(self) -> bool:
        """True if a failed object is worth another attempt, or a file lost objects and may be half written."""
        return bool(self._pending) or self.settling

    @property
    def settling(self) -> bool:
        """True if a file lost objects whose deletion has not taken effect yet."""
        return self._source.settling

    def desired(self, kind: str, key: NamespacedName) -> ManifestObject | None:
        """Return an object as the manifests define it."""
        return self._desired.get((kind, key)) or self._desired.get((kind, NamespacedName("", key.name)))

    def apply_changes(self) -> None:
        """Apply new and changed objects, delete removed ones, and retry failed ones."""
        removed: list[Identity] = []
        events = self._source.scan()
        self._scanned = self._scanned or any(isinstance(event, Synced) for event in events)
        for event in events:
            if isinstance(event, Upsert):
                item = cast(ManifestObject, event.object)
                identity = (item.kind, item.key)
                self._desired[identity] = item
                self._pending.add(identity)
            elif isinstance(event, Delete):
                removed.append((event.kind, event.key))
        if self._unconfirmed and self._scanned and not self._source.problems:
            removed += [identity for identity in self._unconfirmed if identity not in self._desired]
            self._unconfirmed.clear()
        for identity in removed:
            self._desired.pop(identity, None)
            self._pending.discard(identity)
            self._object_problems.pop(identity, None)
            applied = self._applied.pop(identity, None)
            if applied is not None:
                self._delete(applied)
        changed = bool(removed or self._pending)
        for identity in sorted(self._pending, key=self._rank):
            if self._apply(identity, self._desired[identity]):
                self._pending.discard(identity)
        if changed and self._record_file is not None:
            replace_file(self._record_file, msgspec.json.encode(list(self._applied.values())))

    def _rank(self, identity: Identity) -> tuple[int, str, Identity]:
        order = _APPLY_FIRST.index(identity[0]) if identity[0] in _APPLY_FIRST else len(_APPLY_FIRST)
        return order, self._desired[identity].origin.rpartition(":")[0], identity

    def _apply(self, identity: Identity, item: ManifestObject) -> bool:
        """Apply an object; return True if no further attempt is useful."""
        kind = self._kind(item)
        if kind is None:
            self._report(identity, item, f"this lab has no kind {item.kind} in {item.api_version}")
            return False
        if item.kind == "Node" and item.name not in self._nodes:
            first, last = self._nodes[0], self._nodes[-1]
            message = f"is not one of this lab's nodes ({first} to {last}), so it is ignored"
            self._report(identity, item, message, severity="warning")
            return True
        if item.kind in ("EndpointSlice", "Endpoints") and self._has_selector(item):
            # The cluster creates these slices; exported manifests contain those of another cluster.
            self._object_problems.pop(identity, None)
            return True
        self._ensure_namespace(kind, item)
        path, body = self._path(kind, item), self._body(identity, item)
        response = self._send("PATCH", path, body)
        if response.status >= 300:
            return self._handle_failure(identity, item, kind, response)
        for part in _statuses(item):
            self._send("PATCH", f"{self._path(kind, item)}/status", part)
        self._applied[identity] = item
        self._object_problems.pop(identity, None)
        return True

    def _handle_failure(
        self, identity: Identity, item: ManifestObject, kind: ApiResource, response: ApiResponse
    ) -> bool:
        if item.kind == "Pod" and identity in self._applied and response.status == 422:
            # Most fields of a pod are immutable: delete it, and create it again once it is gone.
            self._send("DELETE", self._path(kind, item), {})
            return False
        status = msgspec.json.decode(response.body)
        message = str(status.get("message") or f"is refused ({response.status})")
        self._report(identity, item, message)
        # Invalid objects stay invalid until the file changes.
        return response.status in (400, 422)

    def _report(self, identity: Identity, item: ManifestObject, message: str, severity: str = "error") -> None:
        self._object_problems[identity] = Problem(
            origin=item.origin,
            object=item.title,
            message=message,
            severity="warning" if severity == "warning" else "error",
        )

    def _delete(self, item: ManifestObject) -> None:
        kind = self._kind(item)
        if kind is not None:
            self._send("DELETE", self._path(kind, item), {})

    def _kind(self, item: ManifestObject) -> ApiResource | None:
        group, _, version = item.api_version.rpartition("/")
        with self._registry.held() as registry:
            kinds = tuple(registry.kinds.values())
        return next(
            (each for each in kinds if (each.kind, each.group) == (item.kind, group) and version in each.versions), None
        )

    def _path(self, kind: ApiResource, item: ManifestObject) -> str:
        root = f"/apis/{item.api_version}" if kind.group else f"/api/{item.api_version}"
        target_namespace = f"/namespaces/{item.namespace or 'default'}" if kind.namespaced else ""
        return f"{root}{target_namespace}/{kind.plural}/{item.name}"

    def _send(self, method: str, path: str, body: Mapping[str, Any]) -> ApiResponse:
        query = {"fieldManager": MANAGER, "force": "true"} if method == "PATCH" else {}
        request = ApiRequest(
            method,
            path,
            query,
            {"content-type": "application/apply-patch+yaml" if method == "PATCH" else "application/json"},
            msgspec.json.encode(body) if body else b"",
            tuple(query.items()),
        )
        with self._registry.held():
            response = self._api.answer(request)
        if not isinstance(response, ApiResponse):
            raise TypeError(f"{method} {path} was answered by a stream")
        return response

    def _body(self, identity: Identity, item: ManifestObject) -> dict[str, Any]:
        """Return the object to apply, without fields that only servers write."""
        meta = {name: value for name, value in item.raw["metadata"].items() if name not in _SERVER_FIELDS}
        made = {**item.raw, "metadata": meta}
        made.pop("status", None)
        if item.kind == "Node":
            spec = made.get("spec") or {}
            made["spec"] = {name: spec[name] for name in ("taints", "unschedulable") if name in spec}
        if item.kind == "Pod":
            made["spec"] = _with_images(made.get("spec"))
        elif isinstance(template := (made.get("spec") or {}).get("template"), dict):
            made["spec"] = {**made["spec"], "template": {**template, "spec": _with_images(template.get("spec"))}}
        replicas = self._scaled_replicas(identity, item)
        if replicas is not None:
            made["spec"] = {**made["spec"], "replicas": replicas}
        return made

    def _scaled_replicas(self, identity: Identity, item: ManifestObject) -> int | None:
        """Return the replicas that another client has set, unless the manifest itself has changed its number."""
        before = self._applied.get(identity)
        if before is None or _replicas(before.raw) is None or _replicas(before.raw) != _replicas(item.raw):
            return None
        with self._registry.held() as registry:
            held = registry.get(item.kind, item.namespace or "default", item.name)
        return None if held is None else _replicas(held)

    def _has_selector(self, item: ManifestObject) -> bool:
        labels = item.raw["metadata"].get("labels") or {}
        name = labels.get("kubernetes.io/service-name") if item.kind == "EndpointSlice" else item.name
        target_namespace = item.namespace or "default"
        desired = self.desired("Service", NamespacedName(target_namespace, str(name)))
        with self._registry.held() as registry:
            held = desired.raw if desired is not None else registry.get("Service", target_namespace, str(name))
        return bool(held and (held.get("spec") or {}).get("selector"))

    def _ensure_namespace(self, kind: ApiResource, item: ManifestObject) -> None:
        """Create the namespace of an object if needed, so that single files can be applied."""
        target_namespace = item.namespace
        if kind.namespaced and target_namespace:
            with self._registry.held() as registry:
                registry.ensure("Namespace", namespace(target_namespace))


def _with_images(spec: Any) -> Any:
    """Return a pod's spec in which each container has an image; the default is the echo server."""
    containers = spec.get("containers") if isinstance(spec, dict) else None
    if not isinstance(containers, list):
        return spec
    named = [{"image": ECHO, **each} if isinstance(each, dict) else each for each in containers]
    return {**spec, "containers": named}


_APPLIED = msgspec.json.Decoder(list[ManifestObject])


def _load_applied(path: Path | None) -> dict[Identity, ManifestObject]:
    if path is None or not path.exists():
        return {}
    found = _APPLIED.decode(path.read_bytes())
    return {(each.kind, each.key): each for each in found}


def _replicas(raw: Mapping[str, Any]) -> int | None:
    found = (raw.get("spec") or {}).get("replicas")
    return found if isinstance(found, int) else None


def _statuses(item: ManifestObject) -> Iterator[dict[str, Any]]:
    """Yield the load balancer status of a manifest, which is kept: no controller of the lab has assigned it."""
    load_balancer = (
        (item.raw.get("status") or {}).get("loadBalancer") if isinstance(item.raw.get("status"), dict) else None
    )
    if item.kind == "Service" and load_balancer:
        meta = {"name": item.name, "namespace": item.namespace or "default"}
        yield {
            "apiVersion": item.api_version,
            "kind": item.kind,
            "metadata": meta,
            "status": {"loadBalancer": load_balancer},
        }


_MOST = 20
"""Programs that are named; more would fill the screen."""
_LONGEST = 100
"""Characters of a command that are shown."""


def machine_programs(source: Path, images: Images) -> list[str]:
    """Return a line for each container in the manifests that runs a program of this machine; at most some dozens."""
    found = list(_lines(source, images))
    more = [f"... and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return [*found[:_MOST], *more]


def _lines(source: Path, images: Images) -> Iterator[str]:
    for event in ManifestSource(source, decode_document).scan():
        if isinstance(event, Upsert):
            item = cast(ManifestObject, event.object)
            for container in _containers(item.raw):
                image = images.find(container)
                if image.program:
                    words = command_line(container, image.entry_point, image.arguments, {})
                    yield f"{item.title}: {_shown(words)}"


def _shown(words: Sequence[Any]) -> str:
    text = shlex.join(map(str, words)).encode("unicode_escape").decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _containers(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the containers of a pod or of a pod template. Anything malformed is left to the API server."""
    spec = raw.get("spec")
    for field in ("template", "spec"):
        if isinstance(spec, dict) and isinstance(spec.get(field), dict):
            spec = spec[field]
    for name in ("initContainers", "containers"):
        for each in (spec.get(name) if isinstance(spec, dict) else None) or ():
            if isinstance(each, dict) and all(isinstance(each.get(field) or [], list) for field in ("command", "args")):
                yield each
