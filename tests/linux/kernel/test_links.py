"""Links and settings of a namespace."""

import os
import threading
from pathlib import Path

import pytest

from narthex.linux.links import LinkError, ip_batch, set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.rtnetlink import RtNetlink
from narthex.linux.run import run

pytestmark = pytest.mark.kernel


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-links"
    create_namespace(name)
    yield name
    delete_namespace(name)


def test_commands_run_in_order(namespace):
    ip_batch(namespace, ["link add br0 type bridge", "address add 192.0.2.1/24 dev br0", "link set br0 up"])
    assert "192.0.2.1/24" in run(["ip", "-brief", "address", "show", "br0"], namespace=namespace)
    assert not Path("/sys/class/net/br0").exists() or "192.0.2.1" not in run(["ip", "address"])


def test_the_failing_command_is_named(namespace):
    with pytest.raises(LinkError, match=rf"ip link set nope up \(in namespace {namespace}\): Cannot find device"):
        ip_batch(namespace, ["link add br0 type bridge", "link set nope up", "link add br1 type bridge"])
    assert "br1" not in run(["ip", "link"], namespace=namespace)


def test_a_command_is_one_line(namespace):
    with pytest.raises(ValueError, match="one line"):
        ip_batch(namespace, ["link add br0 type bridge\nlink add br1 type bridge"])


def test_nothing_to_do_needs_no_namespace():
    ip_batch("nxt-not-there", [])


def test_a_namespace_that_is_not_there():
    with pytest.raises(FileNotFoundError):
        ip_batch("nxt-not-there", ["link add br0 type bridge"])


def test_settings(namespace):
    set_sysctls(namespace, {"net/ipv4/ip_forward": "1", "net/no/such/setting": "1"})
    with in_namespace(namespace):
        assert Path("/proc/sys/net/ipv4/ip_forward").read_text() == "1\n"


@pytest.mark.parametrize("name", ["kernel/panic", "net/../kernel/panic", "/etc/passwd", "net/ipv4/x\n"])
def test_settings_outside_the_network_are_refused(namespace, name):
    with pytest.raises(ValueError, match="not a setting"):
        set_sysctls(namespace, {name: "1"})


def test_a_link_that_comes_up_late_is_awaited_by_events(namespace, monkeypatch):
    """However long it takes, and whatever else changes: the kernel is asked again only after a report of this link."""
    ip_batch(namespace, ["link add br0 type bridge", "link set br0 up", "link add v0 type veth peer name p0"])
    ip_batch(namespace, ["link set v0 master br0 up", "link add other type bridge"])
    asked, real, waiting = [], RtNetlink.link, threading.Event()

    def link(self, name):
        asked.append(name)
        if len(asked) == 2:
            waiting.set()
        return real(self, name)

    monkeypatch.setattr(RtNetlink, "link", link)
    found = []

    def wait():
        with in_namespace(namespace):
            netlink = RtNetlink()
            found.append(netlink.await_operational("v0", 60))
            netlink.close()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert waiting.wait(60)
        for _ in range(20):
            ip_batch(namespace, ["link set other up", "link set other down"])
    finally:
        ip_batch(namespace, ["link set p0 up"])
        thread.join(60)
    assert not thread.is_alive()
    assert found[0].operational and found[0].forwards
    # Twice before waiting, then after each of the few reports of v0, and once in each second that the test is paused.
    assert len(asked) < 30


def test_a_link_that_stays_down_or_is_missing_is_not_awaited_for_ever(namespace):
    ip_batch(namespace, ["link add v0 type veth peer name p0", "link set v0 up"])
    with in_namespace(namespace):
        netlink = RtNetlink()
        found = netlink.await_operational("v0", 0.01)
        assert found is not None and not found.operational
        assert netlink.await_operational("v1", 0.01) is None
        netlink.close()
