"""From flags to settings; nothing is started here."""

import logging

import pytest
from click.testing import CliRunner

from narthex.apps import start
from narthex.cli import main


@pytest.fixture
def served(monkeypatch):
    """Catches what would be served; restores the log."""
    caught = []
    monkeypatch.setattr(start, "serve", lambda settings, source, _file: caught.append((settings, source)))
    logger = logging.getLogger("narthex")
    before = logger.handlers[:], logger.level, logger.propagate
    yield caught
    logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def call(*arguments):
    return CliRunner().invoke(main, ["proxy", *arguments])


def test_kube_proxys_flags_are_understood(served, tmp_path):
    result = call(
        f"--manifests={tmp_path}",
        "--hostname-override=worker-a",
        "--proxy-mode=iptables",
        "--cluster-cidr=10.64.0.0/12",
        "--masquerade-all",
        "--nodeport-addresses=10.20.0.0/16, fd20::/32",
        "--healthz-bind-address=",
        "--metrics-bind-address=127.0.0.1:9000",
        "--iptables-sync-period=10s",
        "--iptables-min-sync-period=1s",
        "--bind-address-hard-fail",
        "--v=2",
    )
    assert result.exit_code == 0, result.output
    ((told, source),) = served
    assert source.path == tmp_path
    assert told.mode == "iptables"
    assert told.node.node_name == "worker-a"
    assert told.node.masquerade_all
    assert told.node.node_port_addresses == ("10.20.0.0/16", "fd20::/32")
    assert told.healthz is None
    assert told.metrics == ("127.0.0.1", 9000)
    assert (told.periods.minimum, told.periods.sync) == (1.0, 10.0)
    assert told.bind_address_hard_fail


def test_local_mode_flags(served, tmp_path):
    result = call(
        f"--manifests={tmp_path}",
        "--hostname-override=a",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
    )
    assert result.exit_code == 0, result.output
    assert served[0][0].node.interface_name_prefix == "veth"


def test_manifests_are_needed():
    result = call("--hostname-override=a")
    assert result.exit_code == 2
    assert "--manifests" in result.output


@pytest.mark.usefixtures("served")
def test_settings_that_cannot_be_used_end_it_with_a_clear_word(tmp_path):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", "--proxy-mode=chains")
    assert result.exit_code == 1
    assert "Error: command line: mode 'chains' is not nftables, iptables or ipvs" in result.output


def test_what_keeps_it_from_starting_is_said(served, monkeypatch, tmp_path):
    def refuse(*_):
        raise start.StartError("no kernel\nhere")

    monkeypatch.setattr(start, "serve", refuse)
    result = call(f"--manifests={tmp_path}", "--hostname-override=a")
    assert result.exit_code == 1
    assert r"Error: no kernel\nhere" in result.output
    assert served == []


@pytest.mark.usefixtures("served")
def test_warnings_go_to_the_log(tmp_path):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", "--log-format=json")
    assert '"level":"warning"' in result.output
    assert "no clusterCIDR is given" in result.output
