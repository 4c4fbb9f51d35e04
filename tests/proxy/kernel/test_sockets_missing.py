"""Where socket load balancing cannot work, the proxy says why, and the rules serve the connections."""

import errno
import json

import pytest
from tests.proxy.kernel.small_cluster import HERE, SOCKETS, SmallCluster, service, slices
from tests.proxy.kernel.test_sockets import PODS, plan_of, socket_world

from narthex.bpf import AttachKind
from narthex.linux.bpf import BpfError, BpfProgram
from narthex.linux.cgroups import cgroup_mount
from narthex.linux.namespaces import in_namespace
from narthex.model import IPFamily
from narthex.proxy.kernel import sockets as kernel_sockets
from narthex.testing.load import Load

pytestmark = pytest.mark.kernel

WITHOUT = {
    "root": (
        ("setpriv", "--bounding-set", "-bpf,-sys_admin,-perfmon"),
        "loading BPF programs needs root (CAP_BPF, CAP_NET_ADMIN, and CAP_SYS_ADMIN)",
    ),
    "cgroup v2": (
        ("unshare", "--mount", "sh", "-c", f'umount -l {cgroup_mount()}; exec "$@"', "sh"),
        "no cgroup v2 hierarchy is mounted: mount one (mount -t cgroup2 none /sys/fs/cgroup)",
    ),
    "the cgroup": (
        (
            "sh",
            "-c",
            'sed -i s,socketLoadBalancingCgroup:.*,"socketLoadBalancingCgroup: /none", $CONFIG; exec "$@"',
            "sh",
        ),
        "/none is no cgroup: create it, or correct socketLoadBalancingCgroup",
    ),
}


@pytest.fixture
def cluster(tmp_path):
    with SmallCluster(tmp_path, SOCKETS) as made:
        made.serve(*HERE[4][:2])
        made.put("web", service(), *slices(dict.fromkeys(HERE[4][:2], "ready")))
        yield made


@pytest.mark.parametrize("without", WITHOUT)
def test_rules_serve_what_sockets_cannot(cluster, without):
    program, reason = WITHOUT[without]
    cluster.start(program=program).ready()
    load = Load([cluster.from_pod(4), cluster.from_outside(4)])
    try:
        load.hold(20)
        load.exchange()
        assert load.failures == [] and len(load.held) == 20
    finally:
        load.close()
    assert f"socket load balancing stays off: {reason}; the rules serve all connections" in cluster.log
    assert cluster.sent_to_endpoints == 0
    status, body = cluster.get(10249, "/sockets")
    shown = json.loads(body)
    assert status == 200 and shown["active"] is False and shown["reason"] == reason
    _, metrics = cluster.get(10249, "/metrics")
    assert f'narthex_socket_load_balancing{{reason="{reason}"}} 0.0' in metrics


def test_a_kernel_without_a_hook_keeps_it_off(tmp_path, monkeypatch, caplog):
    """The kernel refuses a program whose hook it does not know with EINVAL."""
    load = BpfProgram.load

    def without_getpeername(spec, maps):
        if spec.attach is AttachKind.GETPEERNAME4:
            raise BpfError(errno.EINVAL, "Invalid argument")
        return load(spec, maps)

    with socket_world(tmp_path) as world:
        monkeypatch.setattr(BpfProgram, "load", without_getpeername)
        accelerator = world.accelerator()
        with in_namespace(world.node):
            accelerator.follow(plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4]))
            accelerator.follow(plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4][:1]))
        assert accelerator.reason == "the kernel does not load programs of type getpeername4: Invalid argument"
        assert caplog.text.count("socket load balancing stays off: the kernel does not load programs of type") == 1
        assert not world.pins.exists()


def test_programs_of_an_earlier_process_go_if_no_process_would_update_them(tmp_path, monkeypatch):
    with socket_world(tmp_path) as world:
        world.follow(world.accelerator(), IPFamily.IPV4, PODS[IPFamily.IPV4])
        assert world.pinned()
        monkeypatch.setattr(kernel_sockets, "missing_feature", lambda: "something is missing")
        later = world.accelerator()
        with in_namespace(world.node):
            later.follow(plan_of(IPFamily.IPV4, PODS[IPFamily.IPV4]))
        assert later.reason == "something is missing" and world.pinned() == frozenset()
