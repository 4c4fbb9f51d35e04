"""Kernel settings at the start, in a namespace that may change some of them and not others."""

import os
import shlex
import socket
import subprocess
import sys

import pytest
from tests.proxy.kernel.small_cluster import CALLERS, CLUSTER_IP, HERE, POD, PORT, SOURCE, SmallCluster, service, slices
from tests.uml.machine import Machine

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

pytestmark = [pytest.mark.kernel, pytest.mark.row("19.1", "19.3", "19.5", "29.8")]

NAMES = ("tcp_timeout_established", "tcp_timeout_close_wait", "udp_timeout", "udp_timeout_stream", "tcp_be_liberal")


def values(namespace):
    """The kernel's settings there, by name."""
    names = [f"net/netfilter/nf_conntrack_{name}" for name in (*NAMES, "max")]
    found = run(["cat", *(f"/proc/sys/{name}" for name in names)], namespace=namespace).split()
    return dict(zip((*NAMES, "max"), map(int, found), strict=True))


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-settings"
    create_namespace(name)
    yield name
    delete_namespace(name)


def init_only(namespace, *flags):
    argv = [sys.executable, "-m", "narthex", "proxy", "--init-only", "--hostname-override", "worker-a", *flags]
    with in_namespace(namespace):
        return subprocess.run(
            argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(SOURCE)}
        )


@pytest.mark.row("19.4", "19.9", "9.9")
def test_init_only_makes_what_can_be_made_says_what_cannot_and_ends(namespace):
    before = values(namespace)
    done = init_only(
        namespace,
        *("--proxy-mode", "iptables", "--conntrack-max-per-core", "50000", "--conntrack-min", "100000"),
        *("--conntrack-tcp-timeout-established", "2h", "--conntrack-udp-timeout", "45s", "--conntrack-tcp-be-liberal"),
    )
    assert done.returncode == 0, done.stderr
    now = values(namespace)
    assert (now["tcp_timeout_established"], now["tcp_timeout_close_wait"], now["udp_timeout"]) == (7200, 3600, 45)
    assert (now["udp_timeout_stream"], now["tcp_be_liberal"]) == (before["udp_timeout_stream"], 1)
    assert run(["cat", "/proc/sys/net/ipv4/conf/all/route_localnet"], namespace=namespace) == "1\n"
    assert run(["nft", "list", "ruleset"], namespace=namespace) == ""
    # The size of the table is the machine's alone.
    assert now["max"] == before["max"]
    assert f"nf_conntrack_max could not be set to {min(1 << 20, max(100000, 50000 * os.cpu_count()))}" in done.stderr
    assert "conntrack.maxPerCore: 0" in done.stderr

    again = init_only(namespace, "--proxy-mode", "nftables", "--conntrack-max-per-core", "0")
    assert again.returncode == 0, again.stderr
    # Of what is right nothing is said, and what nobody asked for is left as it is.
    assert "tcp_timeout_close_wait" not in again.stderr
    assert "set net/netfilter/nf_conntrack_tcp_timeout_established to 86400 (it was 7200)" in again.stderr
    assert values(namespace) == {**now, "tcp_timeout_established": 86400}


@pytest.mark.row("19.9")
def test_init_only_loads_the_module_that_brings_the_settings(tmp_path):
    """On a machine that has just booted; whoever runs afterwards may find the settings read-only."""
    argv = [sys.executable, "-m", "narthex", "proxy", "--init-only", "--hostname-override", "worker-a"]
    argv += ["--conntrack-tcp-timeout-established", "2h", "--conntrack-min", "70000", "--conntrack-max-per-core", "1"]
    setting = "/proc/sys/net/netfilter/nf_conntrack"
    script = f"[ ! -e {setting}_max ] && {shlex.join(argv)} && cat {setting}_tcp_timeout_established {setting}_max"
    environment = {"PYTHONPATH": str(SOURCE)}
    with Machine(tmp_path, ["sh", "-c", script], environment, modules=["dummy"]) as booted:
        assert booted.wait(200) == 0, booted.output
    assert booted.output.startswith("7200\n70000\n")
    assert "could not be set" not in booted.output


@pytest.mark.row("30.10")
def test_a_connection_in_close_wait_is_remembered_for_an_hour(tmp_path):
    with SmallCluster(tmp_path, "nftables") as cluster:
        end = HERE[4][0]
        cluster.put("web", service(), *slices({end: "ready"}))
        # A size that the machine does not have.
        cluster.start("--conntrack-min", "987654").ready()
        assert "nf_conntrack_max could not be set" in cluster.log
        with in_namespace(cluster.world.namespace(cluster.world.layout.homes[end])):
            listener = socket.create_server((end, PORT))
        with in_namespace(cluster.world.namespace(CALLERS)):
            client = socket.socket()
        with listener, client:
            client.bind((POD[4], 0))
            client.connect((CLUSTER_IP[4], 80))
            server, _ = listener.accept()
            with server:
                client.shutdown(socket.SHUT_WR)
                assert server.recv(1) == b""
                argv = ["conntrack", "-L", "-p", "tcp", "--state", "CLOSE_WAIT"]
                cluster.wait(lambda: run(argv, namespace=cluster.world.node), "the state")
                seconds = int(run(argv, namespace=cluster.world.node).split()[2])
        assert 3500 < seconds <= 3600
