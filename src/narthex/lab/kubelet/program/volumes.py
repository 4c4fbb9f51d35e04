"""Files of pods: volumes, mounted system files, logs.

/run/narthex/lab/NAME/pods/UID/hosts, hostname, resolv.conf
                              /volumes/VOLUME/          content of a volume
                              /log/CONTAINER/N.log      N: number of earlier restarts
                     /account/NAMESPACE/                token, ca.crt, namespace: the service account
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from narthex.lab.api.errors import StatusError
from narthex.lab.api.tokens import ISSUER, issue_token
from narthex.lab.containers.root import BindMount
from narthex.lab.kubelet.environment import ContainerConfigError, field_value, hostname, hosts, resolver
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import StateDirectory
from narthex.runtime.files import replace_file

_TOKEN_SECONDS = 3600
"""Lifetime of a token whose volume names none. Nothing replaces it in the volume."""
_ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"

CreateToken = Callable[[str, str, Mapping[str, Any], Mapping[str, Any]], str]
"""Returns a token of a service account: namespace, name of the account, pod, `serviceAccountToken`. Raises StatusError."""

_LOG = "log"


class PodFiles:
    """Creates and removes pod files. Different pods may be handled in parallel."""

    def __init__(
        self, directory: StateDirectory, registry: SharedRegistry, create_token: CreateToken | None = None
    ) -> None:
        """Without `create_token`, each pod has the token of the lab's own API server."""
        self._create_token = create_token
        self._pods = directory.path / "pods"
        self._accounts = directory.path / "account"
        self._certificate = directory.certificate
        self._token = directory.token
        self._registry = registry
        self._node_logs = directory.logs

    def directory(self, pod: Mapping[str, Any]) -> Path:
        """Return the pod's directory."""
        return self._pods / str(pod["metadata"]["uid"])

    def log(self, pod: Mapping[str, Any], container: str, number: int) -> Path:
        """Return the log of a container after `number` restarts."""
        return self.directory(pod) / _LOG / container / f"{number}.log"

    def logs(self, pod: Mapping[str, Any]) -> dict[str, Path]:
        """Return the log files of a pod, by container and name."""
        directory = self.directory(pod) / _LOG
        return {str(file.relative_to(directory)): file for file in directory.glob("*/*.log*")}

    def node_logs(self, node: str) -> dict[str, Path]:
        """Return the log files of a node's own programs, by name."""
        return {file.name: file for pattern in ("", "-*") for file in self._node_logs.glob(f"{node}{pattern}.log")}

    def node_log(self, node: str, pod: str) -> Path:
        """Return the log of the program that a mirror pod shows: its own, or that of the node's process."""
        own = self._node_logs / f"{node}-{pod.removesuffix(f'-{node}')}.log"
        return own if own.exists() else self._node_logs / f"{node}.log"

    def resolver(self, pod: Mapping[str, Any]) -> Path:
        """Return the pod's resolv.conf, which exists only if the pod does not use the machine's."""
        return self.directory(pod) / "resolv.conf"

    def check(self, pod: Mapping[str, Any]) -> None:
        """Raise ContainerConfigError if a volume is unavailable."""
        for volume in pod["spec"].get("volumes") or ():
            self._content(pod, volume)

    def write(self, pod: Mapping[str, Any], addresses: tuple[str, ...]) -> None:
        """Write all files of a pod. Raises OSError or ContainerConfigError."""
        directory = self.directory(pod)
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        servers = resolver(pod)
        if servers is not None:
            self.resolver(pod).write_text(servers)
        (directory / "hosts").write_text(hosts(pod, addresses))
        (directory / "hostname").write_text(f"{hostname(pod)}\n")
        for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
            self.log(pod, container["name"], 0).parent.mkdir(parents=True, exist_ok=True)
        for volume in pod["spec"].get("volumes") or ():
            content = self._content(pod, volume)
            if content is not None:
                folder = directory / "volumes" / volume["name"]
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                # Any user may write to an emptyDir.
                folder.chmod(0o777)
                for name, data in content.items():
                    (folder / name).write_bytes(data)

    def refresh(self, pod: Mapping[str, Any]) -> bool:
        """Bring volumes up to date with their ConfigMaps and Secrets; return False if the pod has no such volume. Raises OSError.

        If an object is gone, its volume stays as it is.
        """
        followed = [each for each in pod["spec"].get("volumes") or () if "configMap" in each or "secret" in each]
        for volume in followed:
            try:
                content = self._content(pod, volume) or {}
            except ContainerConfigError:
                continue
            folder = self.directory(pod) / "volumes" / volume["name"]
            present = {file.name: file.read_bytes() for file in folder.iterdir()}
            for name, data in content.items():
                if present.get(name) != data:
                    replace_file(folder / name, data, 0o644)
            for name in present.keys() - content.keys():
                (folder / name).unlink()
        return bool(followed)

    def mounts(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[BindMount]:
        """Yield the mounts of a container. Raises ContainerConfigError."""
        directory = self.directory(pod)
        if self.resolver(pod).exists():
            yield BindMount(str(self.resolver(pod)), "/etc/resolv.conf")
        if not pod["spec"].get("hostNetwork"):
            yield BindMount(str(directory / "hosts"), "/etc/hosts")
            if Path("/etc/hostname").exists():
                yield BindMount(str(directory / "hostname"), "/etc/hostname")
        # Another API server adds a projected volume to the pods that are to have a token.
        if self._create_token is None and pod["spec"].get("automountServiceAccountToken", True):
            yield BindMount(str(self._account(pod["metadata"]["namespace"])), _ACCOUNT, True)
        volumes = {each["name"]: each for each in pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            volume = volumes.get(mount["name"])
            if volume is None:
                raise ContainerConfigError(f'volume "{mount["name"]}" is not among the pod\'s volumes')
            yield _volume_mount(volume, mount, directory)

    def remove(self, pod: Mapping[str, Any]) -> None:
        """Remove all files of a pod."""
        shutil.rmtree(self.directory(pod), ignore_errors=True)

    def _account(self, namespace: str) -> Path:
        directory = self._accounts / namespace
        if not (directory / "namespace").exists():
            directory.mkdir(parents=True, exist_ok=True)
            for source, name in ((self._certificate, "ca.crt"), (self._token, "token")):
                if source.exists() and not (directory / name).exists():
                    shutil.copy(source, directory / name)
                    # Also for containers that do not run as root. Only pods and root reach the directory.
                    (directory / name).chmod(0o644)
            (directory / "namespace").write_text(namespace)
        return directory

    def _content(self, pod: Mapping[str, Any], volume: Mapping[str, Any]) -> dict[str, bytes] | None:
        """Return the files of a volume; None for a hostPath."""
        if "hostPath" in volume:
            return None
        for field, kind, name_field in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            if field in volume:
                return self._object_files(pod, volume[field], kind, str(volume[field].get(name_field) or ""))
        if "projected" in volume:
            sources = volume["projected"].get("sources") or ()
            return {path: data for each in sources for path, data in self._projected(pod, each).items()}
        if "emptyDir" in volume or set(volume) <= {"name"}:
            return {}
        raise ContainerConfigError(f'MountVolume.SetUp failed for volume "{volume["name"]}": a lab has no such volumes')

    def _projected(self, pod: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, bytes]:
        """Return the files of one source of a projected volume."""
        for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            if field in source:
                return self._object_files(pod, source[field], kind, str(source[field].get("name") or ""))
        if "downwardAPI" in source:
            items = source["downwardAPI"].get("items") or ()
            fields = ((each["path"], each["fieldRef"]["fieldPath"]) for each in items if "fieldRef" in each)
            return {path: field_value(pod, field).encode() for path, field in fields if _is_inside(path)}
        token = source.get("serviceAccountToken")
        if token is None or not _is_inside(str(token["path"])):
            raise ContainerConfigError(f"MountVolume.SetUp failed for volume: a lab has no source {'/'.join(source)}")
        return {str(token["path"]): self._token_for(pod, token).encode()}

    def _token_for(self, pod: Mapping[str, Any], source: Mapping[str, Any]) -> str:
        meta, account = pod["metadata"], str(pod["spec"].get("serviceAccountName") or "default")
        if self._create_token is None:
            with self._registry.held() as registry:
                audiences = [source["audience"]] if source.get("audience") else [ISSUER]
                seconds = int(source.get("expirationSeconds") or _TOKEN_SECONDS)
                return issue_token(registry, meta["namespace"], account, audiences, seconds, pod)[0]
        try:
            return self._create_token(meta["namespace"], account, pod, source)
        except StatusError as error:
            why = f"failed to fetch token: {error}"
            raise ContainerConfigError(f"MountVolume.SetUp failed for volume: {why}") from error

    def _object_files(
        self, pod: Mapping[str, Any], source: Mapping[str, Any], kind: str, name: str
    ) -> dict[str, bytes]:
        with self._registry.held() as registry:
            held = registry.get(kind, pod["metadata"]["namespace"], name)
        if held is None:
            if source.get("optional"):
                return {}
            raise ContainerConfigError(f'MountVolume.SetUp failed for volume: {kind.lower()} "{name}" not found')
        data = {key: _bytes(kind, value) for key, value in (held.get("data") or {}).items()}
        data |= {key: base64.b64decode(value) for key, value in (held.get("binaryData") or {}).items()}
        if source.get("items"):
            data = {str(item["path"]): data[item["key"]] for item in source["items"] if item["key"] in data}
        # Reject paths that would lead outside of the volume.
        return {path: value for path, value in data.items() if _is_inside(path)}


def _is_inside(path: str) -> bool:
    return "/" not in path and path not in ("", ".", "..")


def _volume_mount(volume: Mapping[str, Any], mount: Mapping[str, Any], directory: Path) -> BindMount:
    """Return the mount of a volume. A hostPath is the container's private view of that path."""
    at, read_only, sub = str(mount["mountPath"]), bool(mount.get("readOnly")), str(mount.get("subPath") or "")
    if "hostPath" in volume:
        path = os.path.normpath(f"/{str(volume['hostPath']['path']).lstrip('/')}/{sub}")
        return BindMount(path, at, read_only, in_view=True)
    source = str(directory / "volumes" / volume["name"])
    return BindMount(_below(source, sub) if sub else source, at, read_only, resolved=bool(sub))


def _bytes(kind: str, value: Any) -> bytes:
    return base64.b64decode(value) if kind == "Secret" else str(value).encode()


def _below(folder: str, path: str) -> str:
    """Return a path below a directory. Raises ContainerConfigError if it leads outside."""
    found = os.path.realpath(f"{folder}/{path}")
    if not found.startswith(f"{os.path.realpath(folder)}/"):
        raise ContainerConfigError(f"subPath {path!r} leads out of its volume")
    return found
