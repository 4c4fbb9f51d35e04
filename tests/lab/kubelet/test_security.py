"""What a manifest can ask for, and what its containers get."""

from pathlib import Path

from narthex.lab.containers.program import DEFAULT_CAPABILITIES
from narthex.lab.containers.root import BindMount
from narthex.lab.kubelet.program.containers import capabilities_of
from narthex.lab.kubelet.program.images import Images
from narthex.lab.kubelet.program.volumes import _volume_mount
from narthex.lab.program.manifests import machine_programs

POD = Path("/run/narthex/lab/x/pods/uid")


def test_capabilities():
    assert set(capabilities_of({})) == set(DEFAULT_CAPABILITIES)
    assert capabilities_of({"drop": ["ALL"]}) == ()
    assert capabilities_of({"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}) == ("NET_BIND_SERVICE",)
    assert set(DEFAULT_CAPABILITIES) - set(capabilities_of({"drop": ["CAP_MKNOD", "kill"]})) == {"MKNOD", "KILL"}


def test_what_reaches_beyond_the_pod_cannot_be_added():
    wanted = {
        "drop": ["ALL"],
        "add": ["SYS_ADMIN", "SYS_PTRACE", "SYS_MODULE", "DAC_READ_SEARCH", "SYS_RAWIO", "BPF", "x"],
    }
    assert capabilities_of(wanted) == ()
    assert set(capabilities_of({"add": ["ALL"]})) - set(DEFAULT_CAPABILITIES) == {
        "IPC_LOCK",
        "NET_ADMIN",
        "NET_BROADCAST",
    }


def test_a_host_path_is_looked_up_in_the_view_of_the_container():
    volume = {"name": "v", "hostPath": {"path": "/var/lib/../log"}}
    assert _volume_mount(volume, {"mountPath": "/m"}, POD) == BindMount("/var/log", "/m", in_view=True)
    mount = {"mountPath": "/m", "subPath": "../../root", "readOnly": True}
    assert _volume_mount(volume, mount, POD) == BindMount("/root", "/m", True, in_view=True)
    assert _volume_mount({"name": "v", "emptyDir": {}}, {"mountPath": "/m"}, POD) == BindMount(
        str(POD / "volumes/v"), "/m"
    )


def test_the_programs_of_the_machine_are_named_before_they_run(tmp_path):
    (tmp_path / "pods.yaml").write_text(
        """
apiVersion: v1
kind: Pod
metadata: {name: evil}
spec:
  initContainers: [{name: a, image: /bin/sh, command: [sh, -c, "rm -rf /\\u001b[2J"]}]
  containers: [{name: b, image: echo}, {name: c, image: "registry/web:1"}, 7, {name: d, image: /bin/sh, args: 3}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: shop}
spec: {selector: {matchLabels: {a: b}}, template: {spec: {containers: [{name: a, image: /bin/sh, args: [x]}]}}}
---
apiVersion: batch/v1
kind: CronJob
metadata: {name: odd}
spec: 3
"""
    )
    evil, web = machine_programs(tmp_path, Images())
    assert evil == "Pod evil: sh -c 'rm -rf /\\x1b[2J'" or evil == "Pod default/evil: sh -c 'rm -rf /\\x1b[2J'"
    assert web == "Deployment shop/web: /bin/sh x"
    (tmp_path / "pods.yaml").write_text(
        "\n---\n".join(
            f"{{apiVersion: v1, kind: Pod, metadata: {{name: p{n}}}, spec: {{containers: [{{name: c, image: /bin/sh}}]}}}}"
            for n in range(30)
        )
    )
    assert (
        len(machine_programs(tmp_path, Images())) == 21
        and machine_programs(tmp_path, Images())[-1] == "... and 10 more"
    )
