"""Programs in namespaces of their own, on a real kernel."""

import os
import signal
import threading
from pathlib import Path

import pytest

from narthex.lab.containers.container import JOBS, Containers, ContainerStartError
from narthex.lab.containers.log import LogReader
from narthex.lab.containers.program import ExecSpec, ProgramSpec
from narthex.lab.containers.root import BindMount
from narthex.linux.forks import ForkServer
from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.processes import processes_inside
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def runtime():
    namespace = f"nxt-{os.getpid()}-ctr"
    forks = ForkServer(JOBS)
    containers = Containers(forks)
    watch = threading.Thread(target=containers.watch, daemon=True)
    watch.start()
    create_namespace(namespace)
    yield containers, namespace, forks
    forks.close()
    containers.stop()
    watch.join()
    until(lambda: not processes_inside([namespace]), "the end of all")
    delete_namespace(namespace)


def shell(runtime, tmp_path, script, **more):
    containers, namespace, _ = runtime
    log = tmp_path / "0.log"
    told = {"environment": ENVIRONMENT, "hostname": "web-1", "log": str(log), **more}
    program = ProgramSpec(argv=("sh", "-c", script), executable="/bin/sh", network_namespace=namespace, **told)
    return containers.run(program), log


def said(log, **how):
    return b"".join(entries(log, **how)).decode()


def entries(log, lines=None, **how):
    with LogReader(log, **how) as reader:
        return reader.tail(lines)


def test_it_sees_a_machine_of_its_own(runtime, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("10.244.1.2 web-1\n")
    script = (
        "echo $$; hostname; cat /etc/hosts; ls -A /tmp /run /dev/shm; set -- /proc/[0-9]*; echo $#; ls /sys/class/net;"
        "ls /proc/self/fd; grep -c netns /proc/self/mounts; echo $WORD; pwd; exit 7"
    )
    shows = (BindMount(str(hosts), "/etc/hosts"), BindMount(str(tmp_path), "/run/secrets/own", True))
    container, log = shell(
        runtime, tmp_path, script, shows=shows, environment={**ENVIRONMENT, "WORD": "$(x) '"}, directory="/usr"
    )
    assert container.wait(60) == 7
    first, name, host, rest = said(log).split("\n", 3)
    assert (first, name, host) == ("1", "web-1", "10.244.1.2 web-1")
    # Two directories that are its own are empty; the third holds what it is shown.
    assert rest == "/dev/shm:\n\n/run:\nsecrets\n\n/tmp:\n1\nlo\n0\n1\n2\n3\n0\n$(x) '\n/usr\n"


def test_what_it_is_shown_read_only_cannot_be_written(runtime, tmp_path):
    shows = (BindMount(str(tmp_path), "/run/secrets/own", True),)
    container, log = shell(runtime, tmp_path, "touch /run/secrets/own/x", shows=shows)
    assert container.wait(60) == 1
    assert "Read-only file system" in said(log)


def test_a_program_below_tmp_is_there(runtime, tmp_path):
    containers, namespace, _ = runtime
    program = tmp_path / "serve"
    program.write_text("#!/bin/sh\ncat $(dirname $0)/words\n")
    program.chmod(0o755)
    (tmp_path / "words").write_text("found\n")
    log = tmp_path / "0.log"
    order = ProgramSpec(argv=("serve",), executable=str(program), environment=ENVIRONMENT, network_namespace=namespace)
    order = ProgramSpec(**{**{name: getattr(order, name) for name in order.__struct_fields__}, "log": str(log)})
    assert containers.run(order).wait(60) == 0
    assert said(log) == "found\n"


def test_what_cannot_be_started_is_said(runtime, tmp_path):
    containers, namespace, _ = runtime
    with pytest.raises(ContainerStartError, match="No such file or directory") as raised:
        containers.run(ProgramSpec(argv=("x",), executable=str(tmp_path / "none"), network_namespace=namespace))
    assert raised.value.missing
    with pytest.raises(ContainerStartError, match="No such file or directory"):
        containers.run(ProgramSpec(argv=("x",), executable="/bin/true", network_namespace=f"{namespace}-none"))
    with pytest.raises(ContainerStartError, match="/no/such/place"):
        shell(runtime, tmp_path, "true", directory="/no/such/place")


def test_the_first_process_ignores_what_it_does_not_handle_and_takes_all_others_with_it(runtime, tmp_path):
    container, _ = shell(runtime, tmp_path, "sleep 1000 & sleep 1000")
    container.signal(signal.SIGTERM)
    assert container.wait(0.2) is None
    container.signal(signal.SIGKILL)
    assert container.wait(60) == 137
    assert container.end.signal == signal.SIGKILL
    _, namespace, _ = runtime
    until(lambda: not processes_inside([namespace]), "the end of what it has started")


def test_a_handled_signal_ends_it_as_the_program_says(runtime, tmp_path):
    container, log = shell(runtime, tmp_path, "trap 'echo told; exit 5' TERM; echo ready; while :; do sleep 0.05; done")
    until(lambda: "ready" in said(log), "its first word")
    container.signal(signal.SIGTERM)
    assert container.wait(60) == 5
    assert said(log) == "ready\ntold\n"


def test_beside_it_runs_another_program(runtime, tmp_path):
    containers, _, _ = runtime
    container, _ = shell(runtime, tmp_path, "touch /tmp/mine; while :; do sleep 1; done")
    reader, writer = os.pipe()
    entry = ExecSpec(
        target_pid=container.pid,
        argv=("sh", "-c", "hostname; echo $$; until ls /tmp/mine 2>/dev/null; do :; done; exit 3"),
    )
    entry = ExecSpec(target_pid=entry.target_pid, argv=entry.argv, environment=ENVIRONMENT)
    other = containers.enter(entry, (writer, writer, writer))
    os.close(writer)
    with os.fdopen(reader) as stream:
        name, number, file = stream.read().split()
    assert (name, file) == ("web-1", "/tmp/mine") and int(number) > 1
    assert other.wait(60) == 3
    container.signal(signal.SIGKILL)
    assert container.wait(60) == 137


def test_logs(runtime, tmp_path):
    container, log = shell(runtime, tmp_path, "echo one; echo two >&2; sleep 0.05; printf three")
    assert container.wait(60) == 0
    lines = entries(log)
    assert sorted(lines[:2]) == [b"one\n", b"two\n"] and lines[2:] == [b"three"]
    assert entries(log, 1) == [b"three"]
    assert entries(log, 2)[1:] == [b"three"]
    assert entries(log, 0) == []
    when = entries(log, timestamps=True)[-1].partition(b" ")[0].decode()
    assert len(when) == len("2016-10-06T00:17:09.669794202Z")
    assert entries(log, since=when) == [b"three"]
    with LogReader(log) as reader, log.open("ab") as file:
        reader.tail(None)
        assert list(reader.more()) == []
        file.write(b"2016-10-06T00:17:09.669794202Z stdout F more\n2016-10-06T00:17:09.669794202Z st")
        file.flush()
        assert list(reader.more()) == [b"more\n"]


def test_with_its_maker_all_ends(tmp_path):
    namespace = f"nxt-{os.getpid()}-end"
    create_namespace(namespace)
    try:
        forks = ForkServer(JOBS)
        containers = Containers(forks)
        watch = threading.Thread(target=containers.watch, daemon=True)
        watch.start()
        program = ProgramSpec(
            argv=("sleep", "1000"),
            executable="/bin/sleep",
            network_namespace=namespace,
            hostname="a",
            log=str(Path(tmp_path) / "0.log"),
        )
        container = containers.run(program)
        forks.close()
        assert container.wait(60) is not None
        until(lambda: not processes_inside([namespace]), "the end of all")
        with pytest.raises(ContainerStartError):
            containers.run(program)
        containers.stop()
        watch.join()
    finally:
        delete_namespace(namespace)
