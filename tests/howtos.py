"""How-tos as written: the commands of their `sh` blocks run in order, in the network namespace of a node.

The cluster is a lab. With the variable NARTHEX_CONTROL_PLANE, its control plane is the official one. Pages that install `deploy/` get
nodes without a proxy, and pods with an image of this working tree. A page's words in capitals, such as NODE, get values, and absolute
paths of the machine become paths below a directory of the page.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]
from tests.lab.kernel.lab_cluster import CONTROL_PLANES, LabCluster, running

from narthex.cni.program.interpreter import copy_interpreter
from narthex.lab import topology

ROOT = Path(__file__).parents[1]
SHELL = re.compile(r"^ *```sh\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
YAML = re.compile(r"^ *```yaml\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SECONDS = 60.0
CONFIGURATIONS = Path(__file__).parent / "proxy" / "configurations"
"""KubeProxyConfigurations as tools that set clusters up write them."""
_COPIED = ("deploy", "docs", "examples")
_MACHINE = re.compile(r"(?<![\w.$}-])(~|/etc|/opt|/var/lib|/tmp|/run/flannel)(?=/)")
_SERVER = re.compile(r"(?:ip netns exec \S+ )?narthex (dns --(?!.*--check)|proxy |cni agent|ui |lab ui)|.*&$")
_POD = "$(kubectl -n kube-system get pod -l app.kubernetes.io/name={} --field-selector spec.nodeName=node-1 -o name | sed s,pod/,,)"
_RBAC = {"ClusterRole": "rules", "ClusterRoleBinding": "subjects", "Role": "rules", "RoleBinding": "subjects"}
_DEPLOYED = "kubectl apply -k deploy/ && kubectl -n kube-system rollout status daemonset narthex --timeout=90s"
_ELSEWHERE_IN_REALITY = "tests/cluster/__main__.py"
"""Real containers and kubelets run it: `make cluster`."""

MANIFESTS = """
apiVersion: v1
kind: Pod
metadata: {name: web-1, namespace: shop, labels: {app: web}}
spec: {nodeName: node-1, containers: [{name: c, image: web, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client, namespace: shop}
spec: {nodeName: node-1, containers: [{name: c, image: web}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {type: LoadBalancer, selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
"""


STOP = "stop the servers"
"""Stands for the prose that asks for it."""


class HowTo(msgspec.Struct, frozen=True, kw_only=True):
    """What a page needs besides its own lines."""

    words: dict[str, str] = {}
    """Values of its words in capitals, and of names that differ in the lab."""
    before: dict[str, str] = {}
    """Commands for what the prose asks for before the line that begins so."""
    elsewhere: dict[str, str] = {}
    """Lines that begin so are run by another test, or by `make cluster`."""
    files: dict[str, str] = {}
    """Files that contain the YAML block of the page that begins so."""
    components: tuple[str, ...] = ()
    """Components of `deploy/kustomization.yaml` that the page switches on."""
    installs: bool = False
    """True if it needs nodes for `deploy/`."""


_NODE = {
    "NODE": "node-1",
    "POD": _POD.format("narthex"),
    "FILE": "$KUBECONFIG",
    "IMAGE": "busybox",
    "NAMESPACE/SERVICE": "shop/web",
}
_BUNDLE = "narthex bundle -o {0}.tgz --node {0} --kubeconfig $KUBECONFIG"
PAGES = {
    "announce-addresses": HowTo(
        words=_NODE,
        before={"head": "kubectl apply -k deploy/crds"},
        elsewhere={"narthex node": "tests/lb/kernel/test_announce_api.py"},
        components=("load-balancer", "announcer"),
        installs=True,
    ),
    "answer-names-on-the-node": HowTo(
        # A pod of a lab has no /dev/net/tun, but the lab's nodes answer names themselves.
        words={"dig": "dig +tries=1"},
        elsewhere={"kubectl": _ELSEWHERE_IN_REALITY},
    ),
    "ask-who-reaches-what": HowTo(words=_NODE),
    "break-things": HowTo(
        words={"node-3": "node-1", "default/far": "shop/web-1", "default/neighbour": "shop/client"},
        before={"narthex lab fault kill": "narthex lab fault end"},
        elsewhere={"narthex lab up": "tests/test_docs.py"},
    ),
    "check-a-node": HowTo(words=_NODE, before={"kubectl -n kube-system exec": _DEPLOYED}, installs=True),
    "give-pods-a-network": HowTo(
        words=_NODE,
        elsewhere={
            "narthex cni agent": "tests/cni/kernel/test_cni.py",
            "podman run": "tests/cni/kernel/test_cni_podman.py",
            "kubectl": _ELSEWHERE_IN_REALITY,
        },
    ),
    "complete-commands": HowTo(),
    "deploy-to-a-cluster": HowTo(
        words=_NODE,
        before={"kubectl -n kube-system rollout status": _DEPLOYED},
        elsewhere={
            "helm upgrade": "tests/deploy/test_helm_chart.py",
            # Its exit status tells that something changes.
            "narthex migrate": "tests/cli/test_migrate.py",
        },
        installs=True,
    ),
    "give-services-addresses": HowTo(
        words=_NODE,
        files={"pools.yaml": "apiVersion: metallb.io/v1beta1"},
        components=("load-balancer",),
        installs=True,
    ),
    "install-on-a-cluster": HowTo(words=_NODE, installs=True),
    "migrate": HowTo(),
    "move-from-coredns": HowTo(
        words={"FILE": "$KUBECONFIG", "dig": "dig +tries=1"},
        before={"narthex dns --conf Corefile --check": "cp examples/dns/Corefile Corefile"},
    ),
    "record-and-replay": HowTo(
        words={"hello-world-deployment": "recorded"},
        before={"narthex lab record": "kubectl create deployment recorded --image=web"},
    ),
    "report-a-service-problem": HowTo(words=_NODE),
    "run-cluster-dns": HowTo(
        words={"dig": "dig +tries=1"},
        before={"narthex dns --conf": "printf '.:5301 {\\n}\\n' > Corefile"},
        components=("cluster-dns",),
        installs=True,
    ),
    "run-ipvs": HowTo(
        elsewhere=dict.fromkeys(("narthex proxy", "ipvsadm", "ipset", "ip address"), "tests/uml/test_how_to.py")
    ),
    "run-the-overlay": HowTo(
        words=_NODE,
        elsewhere={"narthex overlay": "tests/overlay/kernel/test_overlay.py", "kubectl": _ELSEWHERE_IN_REALITY},
    ),
    "run-the-proxy": HowTo(
        before={"ip netns exec try narthex cleanup": STOP},
        elsewhere={"narthex proxy --config": "tests/cli/test_proxy.py"},
    ),
    "see-the-picture": HowTo(elsewhere=dict.fromkeys(("narthex lab ui", "narthex ui"), "tests/lab/ui/test_page.py")),
    "take-a-bundle": HowTo(
        words={
            "kubectl -n kube-system exec POD -c narthex --": "",
            "/var/lib/kube-proxy/kubeconfig.conf": "$KUBECONFIG",
            **_NODE,
        },
        before={
            "narthex trace": "cp node-1.tgz node-2.tgz",
            "narthex check": "narthex bundle --script | sh > node-1.tgz",
            "narthex diff": "cp node-1.tgz yesterday.tgz && cp node-1.tgz today.tgz",
        },
    ),
    "trace-with-kubectl": HowTo(),
    "trace-a-path": HowTo(
        words=_NODE | {"10.244.1.7": "$(kubectl get pod web-1 -n shop -o jsonpath='{.status.podIP}')"},
        before={"narthex trace shop/client": _BUNDLE.format("node-1")},
        elsewhere={
            "iptables-save": "tests/uml/test_ipvs_proxy.py",
            "narthex trace outside shop/web --manifests": "tests/uml/test_ipvs_proxy.py",
        },
    ),
}


QUICK = ("complete-commands", "migrate", "run-ipvs")
"""Pages that `make test` runs. `make howtos` runs all of them, which takes minutes."""


def _page(name: str) -> Path:
    return ROOT / "docs" / "howto" / f"{name}.md"


def shell_lines(page: Path) -> list[str]:
    """Return the commands of a page's `sh` blocks."""
    found = []
    for block in SHELL.findall(page.read_text()):
        lines = [re.sub(r"(^|\s)# .*", "", line).strip() for line in block.splitlines()]
        found += [line for line in lines if line]
    return found


def yaml_blocks(page: Path) -> list[str]:
    """Return the `yaml` blocks of a page."""
    return [textwrap.dedent(each) for each in YAML.findall(page.read_text())]


class PageRun:
    """One page's commands in a directory of its own."""

    def __init__(self, cluster: LabCluster, page: str, directory: Path, settings: HowTo | None = None) -> None:
        """Prepare a directory. `settings` replace those of PAGES where more lines can run."""
        self._cluster = cluster
        self._settings = settings or PAGES[page]
        self._page = page
        self._directory = directory
        self._servers: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._exported: dict[str, str] = {}
        self._namespace = topology.nodes(cluster.name, 2)[0].namespace
        directory.mkdir()
        for name in _COPIED:
            shutil.copytree(ROOT / name, directory / name)
        for name in (
            "home/.kube",
            "etc/narthex",
            "etc/kubernetes",
            "opt/cni/bin",
            "etc/cni/net.d",
            "var/lib/kube-proxy",
            "tmp",
        ):
            (directory / name).mkdir(parents=True)
        self._write_kubeconfigs()
        self._write_programs()
        self._edit_deploy()
        for name, start in self._settings.files.items():
            (directory / name).write_text(next(each for each in yaml_blocks(_page(page)) if each.startswith(start)))

    def _write_kubeconfigs(self) -> None:
        access = yaml.safe_load(self._cluster.kubeconfig.read_text())
        access["clusters"][0]["cluster"]["server"] = f"https://{topology.API_ADDRESS}:{topology.API_PORT}"
        for name in ("kubeconfig", "home/.kube/config"):
            (self._directory / name).write_text(yaml.safe_dump(access))
        # The API server takes the administrator for the kubelet.
        access["users"][0]["user"] |= {
            "as": "system:node:node-1",
            "as-groups": ["system:nodes", "system:authenticated"],
        }
        (self._directory / "etc/kubernetes/kubelet.conf").write_text(yaml.safe_dump(access))

    def _write_programs(self) -> None:
        """Write `narthex`, which finds this lab, and `ssh`, which is on the node already."""
        name, python, kubectl = self._cluster.name, sys.executable, self._cluster.newest
        lab = f'case "$1 $2" in "lab replay") ;; lab*) set -- "$@" --name {name} ;; esac'
        self._program("narthex", f'{lab}\nexec {python} -m narthex "$@"')
        # Not every build of kube-apiserver has the schemas that kubectl checks objects with.
        unchecked = (
            '[ "$1" = apply ] && shift && set -- apply --validate=false "$@"\n' if len(CONTROL_PLANES) > 1 else ""
        )
        self._program("kubectl", f'{unchecked}exec {kubectl} "$@"')
        self._program("kubectl-narthex", f'exec {python} -c "from narthex.cli.kubectl import main; main()" "$@"')
        self._program("ssh", 'shift\nexec "$@"')

    def _program(self, name: str, script: str) -> None:
        path = self._directory / "programs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def _edit_deploy(self) -> None:
        plan = self._directory / "deploy" / "kustomization.yaml"
        plan.write_text(f"{plan.read_text()}\ncomponents: {json.dumps(self._settings.components)}\n")
        access = self._directory / "deploy" / "kubeconfig.conf"
        access.write_text(
            access.read_text().replace("control-plane.example:6443", f"{topology.API_ADDRESS}:{topology.API_PORT}")
        )

    def run(self) -> None:
        """Run all lines. Raises AssertionError with the line that fails."""
        unused = {*self._settings.before, *self._settings.elsewhere}
        try:
            for line in shell_lines(_page(self._page)):
                prefixes = {each for each in unused | {*self._settings.elsewhere} if line.startswith(each)}
                unused -= prefixes
                if any(line.startswith(each) for each in self._settings.elsewhere):
                    continue
                for each in sorted(prefixes & {*self._settings.before}):
                    self._run(self._settings.before[each])
                self._run(line)
            self._stop_servers()
        finally:
            self._end()
        assert not unused, f"{self._page} has no line that begins so: {unused}"

    def _stop_servers(self) -> None:
        for line, server in self._servers:
            assert server.poll() is None, f"{self._page}: {line}: it ended"
            server.terminate()
            server.wait(SECONDS)
        self._servers.clear()

    def _end(self) -> None:
        if self._settings.installs:
            argv = self._argv("kubectl delete -k deploy/ --ignore-not-found")
            subprocess.run(argv, env=self._environment, cwd=self._directory, capture_output=True, check=False)
        for _, server in self._servers:
            server.terminate()
            server.wait(SECONDS)
        subprocess.run(["ip", "netns", "delete", self._try], capture_output=True, check=False)

    @property
    def _try(self) -> str:
        return f"{self._cluster.name}-try"

    def _translated(self, line: str) -> str:
        # Paths inside of a pod stay as they are.
        command, of_pod, rest = line.partition(" -- ") if re.search(r"exec (POD|\$pod) ", line) else (line, "", "")
        command = _MACHINE.sub(
            lambda found: f"{self._directory}/{'home' if found[1] == '~' else found[1][1:]}", command
        )
        line = command + of_pod + rest
        for word, value in {
            **self._settings.words,
            "netns add try": f"netns add {self._try}",
            "netns delete try": f"netns delete {self._try}",
            "exec try": f"exec {self._try}",
        }.items():
            line = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", lambda _: value, line)  # noqa: B023
        return line

    def _run(self, line: str) -> None:
        command = self._translated(line)
        if line == STOP:
            self._stop_servers()
        elif exported := re.fullmatch(r"(?:export )?(\w+)=(\$\(.*\)|\S*)", command):
            value = self._output(f"printf %s {exported[2]}", line)
            self._exported[exported[1]] = value
        elif _SERVER.match(line):
            argv = self._argv("exec " + command.rstrip("& "))
            with (self._directory / f"server-{len(self._servers)}.log").open("w") as log:
                server = subprocess.Popen(argv, env=self._environment, cwd=self._directory, stdout=log, stderr=log)
            self._servers.append((line, server))
        else:
            self._output(command, line)

    def _output(self, command: str, line: str) -> str:
        """Return what a line prints. Where a server has been started before, it may not be ready yet."""
        end = time.monotonic() + (SECONDS if self._servers else 0.0)
        while True:
            done = subprocess.run(
                ["timeout", f"{SECONDS:.0f}", *self._argv(command)],
                env=self._environment, cwd=self._directory, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode == 0 or time.monotonic() >= end:
                break
            time.sleep(0.2)
        assert done.returncode == 0, f"{self._page}: {line}\n{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def _argv(self, command: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self._namespace}", "bash", "-o", "pipefail", "-c", command]

    @property
    def _environment(self) -> dict[str, str]:
        own = {
            "PATH": f"{self._directory / 'programs'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "NO_COLOR": "1",
        }
        own |= {"KUBECONFIG": str(self._directory / "kubeconfig"), "HOME": str(self._directory / "home")}
        return {**os.environ, **own, **self._exported}


@contextlib.contextmanager
def cluster_for(*, installs: bool, control_plane: tuple[str, ...], directory: Path) -> Iterator[LabCluster]:
    """Run a lab; with `installs`, nothing serves Services on its nodes until a page installs it."""
    manifests = directory / "manifests"
    manifests.mkdir()
    (manifests / "shop.yaml").write_text(MANIFESTS)
    options = ["--nodes", "2", "--pool", "192.168.49.240/28", *control_plane]
    if installs:
        image, proxy = directory / "image", directory / "proxy"
        build_image(image)
        write_stand_in(proxy, directory / "gone")
        options += ["--image", f"narthex={image}", "--kube-proxy", str(proxy)]
    with running("howto", *options, directory=manifests) as made:
        if installs:
            (directory / "gone").touch()
            _prepare(made, rbac=not control_plane)
        yield made


def write_stand_in(path: Path, gone: Path) -> None:
    """Write a program that a lab takes for a kube-proxy until a file exists."""
    path.write_text(
        f"#!{sys.executable}\nimport http.server, os, threading, time\n"
        "class Well(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200)\n        self.end_headers()\n"
        "server = http.server.HTTPServer(('127.0.0.1', 10256), Well)\n"
        "threading.Thread(target=server.serve_forever, daemon=True).start()\n"
        f"while not os.path.exists({str(gone)!r}):\n    time.sleep(0.1)\n"
        "server.shutdown()\nserver.server_close()\ntime.sleep(1e6)\n"
    )
    path.chmod(0o755)


def _prepare(cluster: LabCluster, *, rbac: bool) -> None:
    """Create a kube-proxy as kubeadm does, and the kinds that the lab's own API server lacks."""
    if rbac:
        cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(map(_definition, _RBAC)))
    cluster.kubectl("-n", "kube-system", "label", "pod", "-l", "k8s-app=kube-proxy", "k8s-app-")
    access = (ROOT / "deploy" / "kubeconfig.conf").read_text()
    access = access.replace("control-plane.example:6443", f"{topology.API_ADDRESS}:{topology.API_PORT}")
    files = {"config.conf": (CONFIGURATIONS / "kubeadm.yaml").read_text(), "kubeconfig.conf": access}
    labels = {"k8s-app": "kube-proxy"}
    spec = {"containers": [{"name": "kube-proxy", "image": "busybox", "command": ["sleep", "1000000"]}]}
    made = (
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-proxy"}, "data": files},
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "kube-proxy"},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
        },
    )
    words = ("-n", "kube-system", "apply", "--validate=false", "-f", "-")
    cluster.kubectl(*words, stdin=yaml.safe_dump_all(made))


def _definition(kind: str) -> dict[str, object]:
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    fields = {_RBAC[kind]: {"type": "array", "items": anything}, "roleRef": anything}
    version = {"name": "v1", "served": True, "storage": True}
    names = {"kind": kind, "plural": f"{kind.lower()}s"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.rbac.authorization.k8s.io"},
        "spec": {
            "group": "rbac.authorization.k8s.io",
            "scope": "Cluster" if kind.startswith("Cluster") else "Namespaced",
            "names": names,
            "versions": [{**version, "schema": {"openAPIV3Schema": {"type": "object", "properties": fields}}}],
        },
    }


def build_image(directory: Path) -> None:
    """Write an image of a lab with this working tree, the packages that it needs, and the running Python."""
    packages = directory / "opt" / "narthex"
    start = " ".join(copy_interpreter(directory / "opt" / "python")).replace(str(directory), "")
    shutil.copytree(ROOT / "src" / "narthex", packages / "narthex", ignore=shutil.ignore_patterns("__pycache__"))
    names, known = ["narthex"], set[str]()
    while names:
        name = names.pop()
        if name in known:
            continue
        known.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.distribution(name)
            wanted = [
                each for each in found.requires or () if "extra" not in each or (name == "narthex" and "dns" in each)
            ]
            names += [re.split(r"[^\w.-]", each)[0] for each in wanted]
            for file in () if name == "narthex" else found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (packages / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(str(file.locate()), packages / file)
    program = directory / "usr" / "local" / "bin" / "narthex"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec env PYTHONHOME=/opt/python PYTHONPATH=/opt/narthex {start} -m narthex "$@"\n')
    program.chmod(0o755)
    settings = {"Entrypoint": ["/usr/local/bin/narthex"]}
    (directory / "image.json").write_text(json.dumps(settings))
