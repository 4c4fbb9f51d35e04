"""What the lab's commands decide before they touch the machine."""

import os

import pytest

from narthex.lab import topology
from narthex.lab.program import exec as inside
from narthex.lab.program import labs as lab
from narthex.lab.program import node_client as lab_ask
from narthex.lab.program import state as lab_state
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError, LabState, PodRecord, StateDirectory
from narthex.linux.processes import ProcessIdentity


def pod(name, namespace="default", where="nx-t.x"):
    return PodRecord(namespace=namespace, name=name, network_namespace=where)


def state(*pods):
    return LabState(
        name="t",
        mode="nftables",
        source="/manifests",
        since="2026-01-31T12:00:00Z",
        controller=ProcessIdentity(1, 1),
        nodes=topology.nodes("t", 2),
        outside="nx-t-outside",
        pods=pods,
    )


def test_where_commands_run():
    found = state(pod("web", where="A"), pod("db", "shop", "B"))
    for target, namespace in {
        "outside": "nx-t-outside",
        "node-2": "nx-t-node-2",
        "web": "A",
        "default/web": "A",
        "db": "B",
        "shop/db": "B",
    }.items():
        assert inside.find_target(found, target).network_namespace == namespace


def test_a_pod_name_in_two_namespaces_is_not_guessed():
    with pytest.raises(LabError, match="several pods 'web': default/web, shop/web"):
        inside.find_target(state(pod("web"), pod("web", "shop")), "web")


@pytest.mark.parametrize("target", ["", "nobody", "default/nobody", "fabric", "../x"])
def test_targets_that_are_not_there(target):
    with pytest.raises(LabError, match="there are: outside, node-1, node-2"):
        inside.find_target(state(pod("waiting", where="")), target)


def test_a_pod_without_a_node_cannot_be_entered():
    with pytest.raises(LabError):
        inside.find_target(state(pod("waiting", where="")), "waiting")


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_state, "LABS", tmp_path)
    monkeypatch.setattr(lab_state, "PROGRAMS", tmp_path / "programs")
    return tmp_path


def test_state_survives_the_file(elsewhere):
    (elsewhere / "t").mkdir()
    directory = StateDirectory("t")
    assert directory.read() is None
    directory.write(state(pod("web")))
    assert directory.read() == state(pod("web"))
    assert lab_state.existing() == ["t"]


def test_a_crashed_lab_is_not_opened(elsewhere):
    (elsewhere / "t").mkdir()
    StateDirectory("t").write(state())
    with pytest.raises(LabError, match="narthex lab down --name t"):
        lab.open_lab("t")


def test_an_absent_lab_names_the_others(elsewhere):
    with pytest.raises(LabError, match="`narthex lab up` starts one"):
        lab.read("t")
    (elsewhere / "other").mkdir()
    with pytest.raises(LabError, match="there are: other"):
        lab.read("t")


def test_one_owner_at_a_time(elsewhere):
    (elsewhere / "t").mkdir()
    directory = StateDirectory("t")
    lock = directory.lock()
    assert lock is not None
    assert directory.lock() is None
    os.close(lock)
    again = directory.lock()
    assert again is not None
    os.close(again)


@pytest.mark.parametrize("name", ["", "../t", "a b", "UP"])
def test_names_of_no_lab(name):
    with pytest.raises(LabError, match="not a valid name of a lab"):
        StateDirectory(name)


def test_only_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for attempt in (lambda: lab.up("t", LabOptions(nodes=1, mode="nftables")), lambda: lab.down("t")):
        with pytest.raises(LabError, match="only root"):
            attempt()


METRICS = b"""\
# TYPE kubeproxy_sync_proxy_rules_last_timestamp_seconds gauge
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1.0e+02
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} %s
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 99.5
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv6"} 99.5
"""


@pytest.mark.parametrize(
    ("written", "moment", "fine"), [(b"100", 99.0, True), (b"99", 99.0, False), (b"100", 99.7, False)]
)
def test_a_proxy_is_in_step_when_it_saw_the_change_and_wrote_all_it_saw(monkeypatch, written, moment, fine):
    monkeypatch.setattr(lab_ask, "get", lambda *_: (200, METRICS % written))
    assert lab_ask.synced_since("x", moment) is fine


def test_a_proxy_that_does_not_answer_is_not_in_step(monkeypatch):
    def refuse(*_):
        raise ConnectionRefusedError

    monkeypatch.setattr(lab_ask, "get", refuse)
    assert not lab_ask.synced_since("x", 0.0)
    assert not lab_ask.healthy("x")
    monkeypatch.setattr(lab_ask, "get", lambda *_: (200, b""))
    assert not lab_ask.synced_since("x", 0.0)
