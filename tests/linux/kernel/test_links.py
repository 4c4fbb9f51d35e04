"""Links and settings of a namespace."""

import os
from pathlib import Path

import pytest

from narthex.linux.links import LinkError, ip_batch, set_sysctls
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
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
