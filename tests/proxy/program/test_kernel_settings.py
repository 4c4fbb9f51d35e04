"""What is said of kernel settings, and when a setting is tried again."""

import logging

import pytest

from narthex.linux.sysctls import SysctlOutcome
from narthex.model.kernel_setting import KernelSetting
from narthex.proxy.program import kernel_settings
from narthex.proxy.program.kernel_settings import KernelSettings, with_kernel
from narthex.proxy.program.settings import settings

MAX = KernelSetting("net/netfilter/nf_conntrack_max", 131072, "maxPerCore", unasked="conntrack.maxPerCore: 0")
LIBERAL = KernelSetting("net/netfilter/nf_conntrack_tcp_be_liberal", 1, "tcpBeLiberal")


class Machine:
    """Answers what it is told to; remembers what was asked."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def apply(self, wanted):
        wanted = list(wanted)
        self.asked.append(wanted)
        return [SysctlOutcome(each, *self.answers[each.field]) for each in wanted if each.field in self.answers]


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "narthex")
    return caplog


def test_what_is_set_is_said(log):
    machine = Machine(maxPerCore=(65536, ""))
    assert KernelSettings([MAX, LIBERAL], machine.apply).make(last=False)
    assert log.messages == ["set net/netfilter/nf_conntrack_max to 131072 (it was 65536)"]


def test_what_cannot_be_set_is_said_once_with_what_to_do(log):
    machine = Machine(maxPerCore=(65536, "Permission denied"), tcpBeLiberal=(0, "Read-only file system"))
    asked = KernelSettings([MAX, LIBERAL], machine.apply)
    assert not asked.make(last=False)
    machine.answers = {}
    assert asked.make(last=True)
    assert machine.asked == [[MAX, LIBERAL], []]
    assert log.messages == [
        "net/netfilter/nf_conntrack_max could not be set to 131072: Permission denied; it stays 65536; "
        "set it on the machine itself, or ask for nothing (conntrack.maxPerCore: 0)",
        "net/netfilter/nf_conntrack_tcp_be_liberal could not be set to 1: Read-only file system; it stays 0; "
        "set it on the machine itself",
    ]
    assert {record.levelname for record in log.records} == {"WARNING"}


def test_what_the_kernel_does_not_have_yet_is_tried_again_after_the_first_sync(log):
    machine = Machine(maxPerCore=(None, "this kernel does not have it"))
    asked = KernelSettings([MAX, LIBERAL], machine.apply)
    assert not asked.make(last=False)
    assert log.messages == []
    machine.answers = {"maxPerCore": (262144, "")}
    assert asked.make(last=True)
    assert machine.asked == [[MAX, LIBERAL], [MAX]]
    assert log.messages == ["set net/netfilter/nf_conntrack_max to 131072 (it was 262144)"]


def test_what_the_kernel_never_gets_is_said_at_last(log):
    machine = Machine(maxPerCore=(None, "this kernel does not have it"))
    asked = KernelSettings([MAX], machine.apply)
    asked.make(last=False)
    asked.make(last=True)
    assert len(log.messages) == 1
    assert "this kernel does not have it; set it on the machine itself" in log.messages[0]


@pytest.mark.parametrize(("value", "expected"), [(None, True), (0, True), (1, False), (2, False)])
def test_where_the_kernel_is_liberal_invalid_packets_are_not_judged(monkeypatch, value, expected):
    """Row 19.7."""
    monkeypatch.setattr(kernel_settings, "read_sysctl", lambda _: value)
    assert with_kernel(settings({}, None, "worker-a")).node.drop_invalid is expected
