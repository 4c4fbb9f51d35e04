"""What a hostile program in a container can do to the machine: nothing. With and without overlayfs."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from narthex.lab.containers import root
from narthex.lab.containers.container import JOBS, Containers, ContainerStartError
from narthex.lab.containers.log import LogReader
from narthex.lab.containers.program import DEFAULT_CAPABILITIES, ExecSpec, ProgramSpec
from narthex.lab.containers.root import BindMount
from narthex.linux.capabilities import NUMBERS, bounding_set
from narthex.linux.forks import ForkServer
from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.processes import processes_inside
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

ENVIRONMENT = {"PATH": os.environ["PATH"]}
DEFAULT_MASK = 0x00000000A80425FB
"""Capabilities of a container of Docker and containerd without further settings."""


@pytest.fixture(scope="module", params=["overlay", "read-only"])
def runtime(request):
    namespace = f"nxt-{os.getpid()}-iso"
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "overlay":
            # The fork server inherits this: no kernel has such a file system.
            patch.setattr(root, "_OVERLAY", b"nxt-no-such-overlay")
        forks = ForkServer(JOBS)
    containers = Containers(forks)
    watch = threading.Thread(target=containers.watch, daemon=True)
    watch.start()
    create_namespace(namespace)
    yield containers, namespace, request.param == "overlay"
    forks.close()
    containers.stop()
    watch.join()
    until(lambda: not processes_inside([namespace]), "the end of all")
    delete_namespace(namespace)


@pytest.fixture
def machine():
    """A directory of the machine that containers see."""
    with tempfile.TemporaryDirectory(prefix="nxt-", dir="/var/tmp") as found:
        yield Path(found)


def start(runtime, tmp_path, script, **more):
    containers, namespace, _ = runtime
    log = tmp_path / f"{len(list(tmp_path.glob('*.log')))}.log"
    settings = {"environment": ENVIRONMENT, "hostname": "web-1", "log": str(log), **more}
    # One stream, since the order of two is not defined.
    program = ProgramSpec(
        argv=("sh", "-c", f"exec 2>&1; {script}"), executable="/bin/sh", network_namespace=namespace, **settings
    )
    return containers.run(program), log


def output(runtime, tmp_path, script, **more):
    """Run a script to its end and return what it wrote."""
    container, log = start(runtime, tmp_path, script, **more)
    assert container.wait(60) is not None
    with LogReader(log) as reader:
        return b"".join(reader.tail(None)).decode()


def test_files_of_the_machine_stay_as_they_are(runtime, tmp_path, machine):
    (machine / "file").write_text("machine\n")
    (machine / "kept").write_text("kept\n")
    script = (
        f"cd {machine}; echo changed > file; rm -f kept; echo new > new; chmod 777 file; cat file;"
        "for d in / /etc /usr/bin /var/lib; do echo x > $d/nxt-written; done; rm -rf /etc/passwd /etc/hosts"
    )
    said = output(runtime, tmp_path, script)
    # With overlayfs, it sees its own change.
    assert ("changed" in said) == runtime[2]
    assert {each.name: each.read_text() for each in machine.iterdir()} == {"file": "machine\n", "kept": "kept\n"}
    assert (machine / "file").stat().st_mode & 0o777 != 0o777
    assert not any(Path(at, "nxt-written").exists() for at in ("/", "/etc", "/usr/bin", "/var/lib"))
    assert Path("/etc/passwd").exists() and Path("/etc/hosts").exists()


def test_what_one_container_writes_the_next_does_not_see(runtime, tmp_path):
    assert output(runtime, tmp_path, "touch /tmp/mine /root/mine /run/mine /dev/shm/mine") == ""
    assert output(runtime, tmp_path, "ls -A /tmp /root /run /dev/shm") == "/dev/shm:\n\n/root:\n\n/run:\n\n/tmp:\n"


def test_roots_files_keys_and_sockets_are_not_there(runtime, tmp_path, request):
    Path("/run/narthex").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="nxt-", dir="/run/narthex"))
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", str(folder)], check=True))
    (folder / "key").write_text("secret")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "docker.sock"))
        listener.listen()
        script = (
            "ls -A /root; ls -A /run; ls -A /var/lib/narthex /var/lib/docker /var/lib/containerd 2>/dev/null | grep -v :;"
            f"cat {folder}/key /proc/1/root{folder}/key; ls {folder} /var/run/docker.sock /run/containerd; cat /proc/1/cwd{folder}/key"
        )
        said = output(runtime, tmp_path, script)
    assert [line for line in said.splitlines() if line and "No such file or directory" not in line] == []


def test_processes_of_the_machine_live_on(runtime, tmp_path):
    victim = subprocess.Popen(["sleep", "1000"])
    try:
        script = f"kill -9 {victim.pid}; kill -9 {os.getpid()}; kill -9 -1; ls /proc | grep -c '^[0-9]'"
        said = output(runtime, tmp_path, script)
        assert victim.poll() is None
        # The shell and the pipeline.
        assert int(said.split()[-1]) <= 4
    finally:
        victim.kill()
        victim.wait()


def test_it_has_the_capabilities_of_a_container_and_no_others(runtime, tmp_path):
    said = output(runtime, tmp_path, "grep -E 'Cap(Inh|Prm|Eff|Bnd|Amb)' /proc/self/status")
    found = {name.strip(): int(value, 16) for name, _, value in (line.partition(":") for line in said.splitlines())}
    mask = DEFAULT_MASK & sum(1 << number for number in bounding_set(os.getpid()))
    assert found == {"CapInh": 0, "CapPrm": mask, "CapEff": mask, "CapBnd": mask, "CapAmb": 0}
    said = output(runtime, tmp_path, "grep CapBnd /proc/self/status", capabilities=("CHOWN",))
    assert int(said.split()[1], 16) == 1


def test_exec_gives_no_more_than_the_container_has(runtime, tmp_path):
    container, _ = start(runtime, tmp_path, "while :; do sleep 1; done")
    reader, writer = os.pipe()
    argv = (
        "sh",
        "-c",
        "grep CapEff /proc/self/status; ls -A /root; echo x > /proc/sys/kernel/nxt; ls /dev/kmsg /dev/mem",
    )
    entry = ExecSpec(target_pid=container.pid, argv=argv, environment=ENVIRONMENT)
    other = runtime[0].enter(entry, (writer, writer, writer))
    os.close(writer)
    with os.fdopen(reader) as stream:
        first, *rest = stream.read().splitlines()
    assert other.wait(60)
    container.signal(signal.SIGKILL)
    assert int(first.split()[1], 16) & ~DEFAULT_MASK == 0
    assert len(rest) == 3


def test_it_has_no_devices_and_cannot_make_any(runtime, tmp_path, machine):
    shows = (BindMount(str(machine), "/tmp/volume"),)
    # 1:11 is /dev/kmsg, which exists everywhere; reading it would not hurt.
    tries = (
        f"mknod {at}/nxt-kmsg c 1 11 && head -c 1 {at}/nxt-kmsg && echo OPENED;"
        for at in ("/tmp", "/", "/dev", "/tmp/volume", "/root", "/var/tmp")
    )
    said = output(runtime, tmp_path, "ls -A /dev; find /dev -type b;" + "".join(tries), shows=shows)
    names = {"fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"}
    assert set(said.split()[: len(names)]) == names
    assert "OPENED" not in said
    assert (
        output(runtime, tmp_path, "echo x > /dev/null && head -c 3 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c")
        == "3\n4\n"
    )


def test_it_cannot_mount_or_leave_its_root(runtime, tmp_path):
    script = (
        "mount -t tmpfs none /mnt && echo MOUNTED; mount -o remount,rw /proc/sys && echo REMOUNTED;"
        "umount /root && echo UNMOUNTED; umount -l / && echo UNMOUNTED; unshare -m true && echo UNSHARED;"
        f"nsenter -t 1 -m true && echo ENTERED; ls -A /proc/1/root/root; cat /proc/1/root{tmp_path}/0.log && echo READ"
    )
    said = output(runtime, tmp_path, script)
    assert not any(line.isupper() for line in said.splitlines()), said


def test_settings_of_the_machine_are_read_only(runtime, tmp_path):
    # Opened, but not written to. A redirection of `:` that fails would end the shell.
    files = (
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
        "/sys/kernel/uevent_helper",
    )
    there = [path for path in files if Path(path).exists()]
    said = output(runtime, tmp_path, "".join(f"true >> {path} && echo OPENED;" for path in there) + "cat /proc/loadavg")
    assert said.count("Read-only file system") == len(there) and "OPENED" not in said and "/" in said.splitlines()[-1]


def test_a_host_path_is_private_and_leads_nowhere_else(runtime, tmp_path, machine):
    (machine / "file").write_text("machine\n")
    shows = (
        BindMount(str(machine), "/tmp/host", in_view=True),
        BindMount("/", "/tmp/all", in_view=True),
        BindMount("/root", "/tmp/root", in_view=True),
    )
    script = (
        f"cat /tmp/host/file; echo x > /tmp/host/file; echo x > /tmp/all{machine}/file; echo x > /tmp/all{machine}/new;"
        "ls -A /tmp/all/root /tmp/root /tmp/all/run"
    )
    said = output(runtime, tmp_path, script, shows=shows)
    assert said.startswith("machine\n"), said
    assert [(each.name, each.read_text()) for each in machine.iterdir()] == [("file", "machine\n")]
    assert said.endswith("/tmp/all/root:\n\n/tmp/all/run:\n\n/tmp/root:\n")
    for number in range(3, 16):
        show = BindMount(f"/proc/self/fd/{number}", "/tmp/x", in_view=True)
        with contextlib.suppress(ContainerStartError):
            output(runtime, tmp_path, f"echo x > /tmp/x{machine}/file; touch /tmp/x/nxt-written", shows=(show,))
    assert (machine / "file").read_text() == "machine\n" and not Path("/nxt-written").exists()
    with pytest.raises(ContainerStartError, match="No such file"):
        start(runtime, tmp_path, "true", shows=(BindMount("/run/docker.sock", "/tmp/x", in_view=True),))


def test_a_part_of_a_volume_that_became_a_link_is_not_mounted(runtime, tmp_path):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume" / "part").symlink_to("/etc")
    shows = (BindMount(str(tmp_path / "volume" / "part"), "/tmp/part", resolved=True),)
    with pytest.raises(ContainerStartError, match="symbolic link"):
        start(runtime, tmp_path, "true", shows=shows)


def test_mount_points_are_created_in_the_private_layer_only(runtime, tmp_path, machine):
    (tmp_path / "data").mkdir()
    at = machine / "deep" / "data"
    shows = (BindMount(str(tmp_path / "data"), str(at)),)
    if runtime[2]:
        assert output(runtime, tmp_path, f"touch {at}/x", shows=shows) == ""
        assert (tmp_path / "data" / "x").exists()
    else:
        with pytest.raises(ContainerStartError, match="Read-only file system"):
            start(runtime, tmp_path, "true", shows=shows)
    assert not at.parent.exists()


def test_what_a_container_writes_is_bounded(runtime, tmp_path):
    said = output(runtime, tmp_path, "head -c 600000000 /dev/zero > /tmp/big; ls -l /tmp/big | wc -l; rm /tmp/big")
    assert "No space left on device" in said


def test_an_interpreter_below_root_runs(runtime, tmp_path):
    containers, namespace, _ = runtime
    log = tmp_path / "0.log"
    program = ProgramSpec(
        argv=(sys.executable, "-I", "-c", "import json; print(json.dumps(1 + 1))"),
        executable=sys.executable,
        environment=ENVIRONMENT,
        network_namespace=namespace,
        log=str(log),
    )
    assert containers.run(program).wait(60) == 0
    with LogReader(log) as reader:
        assert b"".join(reader.tail(None)) == b"2\n"


def test_default_capabilities_are_known():
    assert sum(1 << number for number in map(NUMBERS.__getitem__, DEFAULT_CAPABILITIES)) == DEFAULT_MASK
