"""A container of deploy/daemonset.yaml as a runtime would start it, without image or runtime: its namespaces, mounts,
capabilities and limits are made here, from the manifest alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from narthex.host import netns

ROOT = Path(__file__).parents[2]
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"

# The root is a memory file system; of the machine it has, read-only, what stands for the image. Then as the OCI runtime
# specification wants a Linux container's file systems to be: /proc, /sys read-only, a small /dev.
SCRIPT = """
root=$1 image=$2 mounts=$3 settings=$4 files=$5
shift 5
mount -t tmpfs -o mode=755 tmpfs "$root"
shown() { mkdir -p "$root$2" && mount --bind "$1" "$root$2" && mount -o remount,bind,ro "$root$2"; }
for path in $image; do shown "$path" "$path"; done
for link in bin sbin lib lib64; do
  if [ -L "/$link" ]; then cp -P "/$link" "$root/$link"; elif [ -d "/$link" ]; then shown "/$link" "/$link"; fi
done
for pair in $mounts; do shown "${pair%%:*}" "${pair##*:}"; done
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


def documents(name):
    """The objects in a file of deploy/, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy" / name).read_text())}


def pod():
    """What the DaemonSet makes pods of."""
    return documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]


def described(name):
    """A container of the pod, by name."""
    return next(each for each in (*pod()["initContainers"], *pod()["containers"]) if each["name"] == name)


def capabilities(name):
    """The capabilities that a container asks for, which gives up all others."""
    asked = described(name)["securityContext"]["capabilities"]
    assert asked["drop"] == ["ALL"]
    return asked["add"]


class Container:
    """One container. The volumes are directories of this machine: `config` has the files of the ConfigMap, `secrets`
    those of the service account."""

    def __init__(self, name, directory, config, secrets=None, folders=()):
        """`directory` is for what is written here; `folders` are shown at their own path, besides."""
        self.container = described(name)
        self.root = directory / f"root-{name}"
        self.root.mkdir(exist_ok=True)
        self.log_path = directory / f"log-{name}"
        self.mounts = [f"{folder}:{folder}" for folder in folders]
        volumes = {volume["name"]: volume for volume in pod()["volumes"]}
        for mount in self.container["volumeMounts"]:
            assert mount["readOnly"] and "configMap" in volumes[mount["name"]], mount
            self.mounts.append(f"{config}:{mount['mountPath']}")
        if secrets:
            self.mounts.append(f"{secrets}:{SECRETS}")

    def start(self, namespace, *more, node="worker-a", without=()):
        """Start it with more arguments than it has; returns the process. `without`: capabilities that are refused."""
        context = self.container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        limits = []
        if not context.get("privileged"):
            kept = [each for each in capabilities(self.container["name"]) if each not in without]
            limits += ["setpriv", ",".join(["--bounding-set=-all", *(f"+{each.lower()}" for each in kept)])]
            limits += ["--inh-caps=-all", "--ambient-caps=-all"]
            limits += [] if context["allowPrivilegeEscalation"] else ["--no-new-privs"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT / "src")}
        for variable in self.container["env"]:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
            environment[variable["name"]] = node
        arguments = [argument.replace("$(NODE_NAME)", node) for argument in self.container["args"]]
        image = {"/usr", "/etc", sys.prefix, sys.base_prefix, str(ROOT / "src")}
        argv = [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"),
            *("sh", "-euc", SCRIPT, "sh", str(self.root), " ".join(sorted(image)), " ".join(self.mounts)),
            *("rw" if context.get("privileged") else "ro", "ro"),
            *limits,
            *(sys.executable, "-m", "narthex", *arguments, *more),
        ]
        with self.log_path.open("wb") as log, netns.entered(namespace):
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=log, stdout=log, env=environment)

    @property
    def log(self):
        return self.log_path.read_text()


def terminate(process):
    """SIGTERM to the first process of the container, as a runtime does; returns its exit status."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    return process.wait(20)
