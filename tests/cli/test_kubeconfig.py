"""Commands that follow a cluster end with an error that names the kubeconfig if it cannot be read."""

import re

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.dns.program.serve import DnsServer
from narthex.lb.program import controller
from narthex.node import process
from narthex.overlay.program import part
from narthex.proxy.program import start

COMMANDS = ["proxy", "node", "overlay", "lb controller", "dns"]


@pytest.fixture
def started(monkeypatch):
    """Catches what would be started."""
    caught = []
    for where, name in ((start, "serve"), (process, "serve_node"), (part, "serve_overlay"), (controller, "serve")):
        monkeypatch.setattr(where, name, lambda *given: caught.append(given))
    monkeypatch.setattr(DnsServer, "run", lambda server: caught.append(server))
    return caught


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("path", "message"),
    [("nope", r"(?i)no such file|does not exist"), ("empty", "is not a kubeconfig"), (".", "directory")],
)
def test_a_kubeconfig_that_cannot_be_read_ends_the_start(started, tmp_path, command, path, message):
    """As it ends kube-proxy: waiting does not mend a wrong path."""
    (tmp_path / "empty").write_text("")
    result = CliRunner().invoke(main, [*command.split(), "--kubeconfig", str(tmp_path / path)])
    assert result.exit_code in (1, 2), result.output
    assert str(tmp_path / path) in result.output and re.search(message, result.output)
    assert started == []


@pytest.mark.parametrize("command", COMMANDS)
def test_one_that_can_be_read_is_followed(started, tmp_path, command):
    (tmp_path / "good").write_text("clusters: []")
    result = CliRunner().invoke(main, [*command.split(), "--kubeconfig", str(tmp_path / "good")])
    assert result.exit_code == 0, result.output
    assert len(started) == 1
