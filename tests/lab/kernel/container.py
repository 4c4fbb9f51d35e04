"""A container of deploy/daemonset.yaml as a runtime would start it, without image or runtime: its namespaces, mounts,
capabilities and limits are made here, from the manifest alone."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run

ROOT = Path(__file__).parents[3]
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"

# The root is a memory file system; of the machine it has, read-only, what stands for the image. Then as the OCI runtime
# specification wants a Linux container's file systems to be: /proc, /sys read-only, a small /dev.
SCRIPT = """
root=$1 image=$2 mounts=$3 shared=$4 settings=$5 files=$6
shift 6
mount -t tmpfs -o mode=755 tmpfs "$root"
shown() { mkdir -p "$root$2" && mount --bind "$1" "$root$2" && mount -o remount,bind,ro "$root$2"; }
for path in $image; do shown "$path" "$path"; done
for link in bin sbin lib lib64; do
  if [ -L "/$link" ]; then cp -P "/$link" "$root/$link"; elif [ -d "/$link" ]; then shown "/$link" "/$link"; fi
done
for pair in $mounts; do shown "${pair%%:*}" "${pair##*:}"; done
mkdir -p "$root/opt/iptables-legacy"
for family in iptables ip6tables; do for what in "" -save -restore; do
  ln -s "/usr/sbin/$family-legacy$what" "$root/opt/iptables-legacy/$family$what"
done; done
for file in $shared; do mkdir -p "$root${file%/*}" && touch "$file" "$root$file" && mount --bind "$file" "$root$file"; done
mkdir "$root/proc" "$root/sys" "$root/dev"
mount -t proc proc "$root/proc"
if [ "$settings" = ro ]; then
  mount --bind "$root/proc/sys" "$root/proc/sys" && mount -o remount,bind,ro "$root/proc/sys"
fi
mount -t sysfs -o ro sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero full random urandom tty; do touch "$root/dev/$name" && mount --bind "/dev/$name" "$root/dev/$name"; done
mount -o "remount,$files" "$root"
exec chroot "$root" "$@"
"""


def documents(name: str) -> dict[str, Any]:
    """The objects in a file of deploy/, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy" / name).read_text())}


def with_patch(folder: Path) -> Path:
    """A copy of deploy/ with the patch for iptables-legacy, switched on as kustomization.yaml says; returns it."""
    shutil.copytree(ROOT / "deploy", folder)
    plan = folder / "kustomization.yaml"
    text = plan.read_text()
    plan.write_text(text.replace("# patches:\n#   - path: iptables-legacy", "patches:\n  - path: iptables-legacy"))
    assert plan.read_text() != text
    return folder


def pod(folder: Path | None = None) -> Any:
    """What the DaemonSet makes pods of: deploy/ as it is, or what kubectl makes of another folder like it."""
    if folder is None:
        found = documents("daemonset.yaml")["DaemonSet"]
    else:
        objects = yaml.safe_load_all(run(["kubectl", "kustomize", str(folder)]))
        found = next(each for each in objects if each["kind"] == "DaemonSet")
    return found["spec"]["template"]["spec"]


def described(name: str, spec: Any = None) -> Any:
    """A container of a pod, by name."""
    spec = spec or pod()
    return next(each for each in (*spec["initContainers"], *spec["containers"]) if each["name"] == name)


def capabilities(container: Any) -> Any:
    """The capabilities that a container asks for, which gives up all others."""
    asked = container["securityContext"]["capabilities"]
    assert asked["drop"] == ["ALL"]
    return asked["add"]


class Container:
    """One container. The volumes are directories of this machine: `config` has the files of the ConfigMap, `secrets`
    those of the service account."""

    def __init__(
        self,
        name: str,
        directory: Path,
        config: str,
        secrets: Any = None,
        folders: Sequence[Path] = (),
        spec: Any = None,
    ) -> None:
        """`directory` is for what is written here; `folders` are shown at their own path, besides. `spec`: another pod
        than deploy/ has."""
        spec = spec or pod()
        self.container = described(name, spec)
        self.root = directory / f"root-{name}"
        self.root.mkdir(exist_ok=True)
        self.log_path = directory / f"log-{name}"
        self.mounts = [f"{folder}:{folder}" for folder in folders]
        self.shared = []
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                assert mount["readOnly"]
                self.mounts.append(f"{config}:{mount['mountPath']}")
            else:
                assert volume["hostPath"] == {"path": mount["mountPath"], "type": "FileOrCreate"}
                self.shared.append(mount["mountPath"])
        if secrets:
            self.mounts.append(f"{secrets}:{SECRETS}")

    def start(
        self, namespace: str, *more: str, node: str = "worker-a", without: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start it with more arguments than it has; returns the process. `without`: capabilities that are refused."""
        context = self.container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        limits = []
        if not context.get("privileged"):
            kept = [each for each in capabilities(self.container) if each not in without]
            limits += ["setpriv", ",".join(["--bounding-set=-all", *(f"+{each.lower()}" for each in kept)])]
            limits += ["--inh-caps=-all", "--ambient-caps=-all"]
            limits += [] if context["allowPrivilegeEscalation"] else ["--no-new-privs"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT / "src")}
        for variable in self.container["env"]:
            if "value" not in variable:
                assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
            environment[variable["name"]] = variable.get("value", node)
        arguments = [argument.replace("$(NODE_NAME)", node) for argument in self.container["args"]]
        image = {"/usr", "/etc", sys.prefix, sys.base_prefix, str(ROOT / "src")}
        argv = [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
            *("sh", "-euc", SCRIPT, "sh", str(self.root), " ".join(sorted(image)), " ".join(self.mounts)),
            " ".join(self.shared),
            *("rw" if context.get("privileged") else "ro", "ro"),
            *limits,
            *(sys.executable, "-m", "narthex", *arguments, *more),
        ]
        with self.log_path.open("wb") as log, in_namespace(namespace):
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log, stdout=log, env=environment)

    @property
    def log(self) -> str:
        return self.log_path.read_text()


def terminate(process: subprocess.Popen[bytes]) -> int:
    """SIGTERM to the first process of the container, as a runtime does; returns its exit status."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    return process.wait(60)
