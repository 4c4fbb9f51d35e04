"""Files of the lab's pods: what they see in the place of the machine's, their volumes, their logs.

/run/narthex/lab/NAME/pods/UID/hosts, hostname, resolv.conf
                              /volumes/VOLUME/          what its volumes hold
                              /log/CONTAINER/N.log      N: how often it had been started before
                     /account/NAMESPACE/                token, ca.crt, namespace: what a pod needs to call the API
"""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narthex.lab.containers.program import BindMount
from narthex.lab.kubelet import hosts_and_dns as files
from narthex.lab.kubelet.environment import ContainerConfigError, hostname
from narthex.lab.program.shared_registry import SharedRegistry
from narthex.lab.program.state import StateDirectory

_ACCOUNT = "/run/secrets/kubernetes.io/serviceaccount"


class PodFiles:
    """Makes and removes them. Files of different pods may come and go side by side."""

    def __init__(self, directory: StateDirectory, registry: SharedRegistry) -> None:
        self._pods = directory.path / "pods"
        self._accounts = directory.path / "account"
        self._certificate = directory.certificate
        self._token = directory.token
        self._registry = registry

    def place(self, pod: Mapping[str, Any]) -> Path:
        """The pod's directory."""
        return self._pods / str(pod["metadata"]["uid"])

    def log(self, pod: Mapping[str, Any], container: str, number: int) -> Path:
        """The log of a container that had been started so often before."""
        return self.place(pod) / "log" / container / f"{number}.log"

    def resolver(self, pod: Mapping[str, Any]) -> Path:
        """The pod's resolv.conf; it is not there when the pod has the machine's."""
        return self.place(pod) / "resolv.conf"

    def check(self, pod: Mapping[str, Any]) -> None:
        """Raise ConfigFault when a volume cannot be had."""
        for volume in pod["spec"].get("volumes") or ():
            self._content(pod, volume)

    def write(self, pod: Mapping[str, Any], addresses: tuple[str, ...]) -> None:
        """Write all that it has. Raises OSError, ConfigFault."""
        place = self.place(pod)
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        resolver = files.resolver(pod)
        if resolver is not None:
            self.resolver(pod).write_text(resolver)
        (place / "hosts").write_text(files.hosts(pod, addresses))
        (place / "hostname").write_text(f"{hostname(pod)}\n")
        for container in (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]):
            (place / "log" / container["name"]).mkdir(parents=True, exist_ok=True)
        for volume in pod["spec"].get("volumes") or ():
            content = self._content(pod, volume)
            if content is not None:
                folder = place / "volumes" / volume["name"]
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                # Whoever the program runs as writes to an emptyDir.
                folder.chmod(0o777)
                for name, data in content.items():
                    (folder / name).write_bytes(data)

    def shows(self, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[BindMount]:
        """What a container sees at other places than the machine does. Raises ConfigFault."""
        place = self.place(pod)
        if self.resolver(pod).exists():
            yield BindMount(str(self.resolver(pod)), "/etc/resolv.conf")
        if not pod["spec"].get("hostNetwork"):
            yield BindMount(str(place / "hosts"), "/etc/hosts")
            if Path("/etc/hostname").exists():
                yield BindMount(str(place / "hostname"), "/etc/hostname")
        if pod["spec"].get("automountServiceAccountToken", True):
            yield BindMount(str(self._account(pod["metadata"]["namespace"])), _ACCOUNT, True)
        volumes = {each["name"]: each for each in pod["spec"].get("volumes") or ()}
        for mount in container.get("volumeMounts") or ():
            volume = volumes.get(mount["name"])
            if volume is None:
                raise ContainerConfigError(f'volume "{mount["name"]}" is not among the pod\'s volumes')
            source = volume["hostPath"]["path"] if "hostPath" in volume else str(place / "volumes" / volume["name"])
            if sub := mount.get("subPath"):
                source = _below(source, str(sub))
            yield BindMount(source, str(mount["mountPath"]), bool(mount.get("readOnly")))

    def remove(self, pod: Mapping[str, Any]) -> None:
        """Take all of it away."""
        shutil.rmtree(self.place(pod), ignore_errors=True)

    def _account(self, namespace: str) -> Path:
        place = self._accounts / namespace
        if not (place / "namespace").exists():
            place.mkdir(parents=True, exist_ok=True)
            for source, name in ((self._certificate, "ca.crt"), (self._token, "token")):
                if source.exists() and not (place / name).exists():
                    shutil.copy(source, place / name)
            (place / "namespace").write_text(namespace)
        return place

    def _content(self, pod: Mapping[str, Any], volume: Mapping[str, Any]) -> dict[str, bytes] | None:
        """The files of a volume; None for one that is a place of the machine."""
        if "hostPath" in volume:
            return None
        for field, kind, name_field in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            if field in volume:
                return self._of_object(pod, volume[field], kind, str(volume[field].get(name_field) or ""))
        if "emptyDir" in volume or set(volume) <= {"name"}:
            return {}
        raise ContainerConfigError(f'MountVolume.SetUp failed for volume "{volume["name"]}": a lab has no such volumes')

    def _of_object(self, pod: Mapping[str, Any], told: Mapping[str, Any], kind: str, name: str) -> dict[str, bytes]:
        with self._registry.held() as registry:
            held = registry.get(kind, pod["metadata"]["namespace"], name)
        if held is None:
            if told.get("optional"):
                return {}
            raise ContainerConfigError(f'MountVolume.SetUp failed for volume: {kind.lower()} "{name}" not found')
        data = {key: _bytes(kind, value) for key, value in (held.get("data") or {}).items()}
        data |= {key: base64.b64decode(value) for key, value in (held.get("binaryData") or {}).items()}
        if told.get("items"):
            data = {str(item["path"]): data[item["key"]] for item in told["items"] if item["key"] in data}
        # A path of more than a name would lead elsewhere.
        return {path: value for path, value in data.items() if "/" not in path and path not in ("", ".", "..")}


def _bytes(kind: str, value: Any) -> bytes:
    return base64.b64decode(value) if kind == "Secret" else str(value).encode()


def _below(folder: str, path: str) -> str:
    """A path below a folder. Raises ConfigFault when it leads out."""
    found = os.path.realpath(f"{folder}/{path}")
    if not found.startswith(f"{os.path.realpath(folder)}/"):
        raise ContainerConfigError(f"subPath {path!r} leads out of its volume")
    return found
