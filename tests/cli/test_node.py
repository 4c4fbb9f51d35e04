"""From flags to the parts of a node; nothing is started here."""

import msgspec
import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.node import process as node_process
from narthex.runtime.configuration.values import NodeParts
from narthex.runtime.process import StartError

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
OWN = "---\napiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\n"


@pytest.fixture
def served(monkeypatch):
    """Catches what would be served."""
    caught = []
    monkeypatch.setattr(node_process, "serve_node", lambda settings, origin, _: caught.append((settings, origin)))
    return caught


def call(*arguments):
    return CliRunner().invoke(main, ["node", *arguments])


def test_the_proxys_options_are_the_nodes(served, tmp_path):
    result = call(
        f"--manifests={tmp_path}", "--hostname-override=worker-a", "--proxy-mode=iptables", "--healthz-port=9"
    )
    assert result.exit_code == 0, result.output
    ((told, origin),) = served
    assert (told.node.node_name, told.mode, told.healthz) == ("worker-a", "iptables", ("0.0.0.0", 9))
    assert told.own.parts.proxy
    assert origin().source.path == tmp_path
    # A part that is started again begins with a source that has told nothing yet.
    assert origin().source is not origin().source


@pytest.mark.parametrize(
    ("flags", "own", "on"),
    [
        ([], "", True),
        (["--no-proxy"], "", False),
        (["--no-proxy", "--explain-service=shop/web"], "", False),
        ([], "parts: {proxy: false}", False),
        (["--proxy"], "parts: {proxy: false}", False),
        (["--no-proxy"], "explainService: shop/web", False),
        (["--no-proxy"], "parts: {proxy: true}", True),
    ],
)
def test_parts_are_switched_by_flag_or_file_and_the_file_wins(served, tmp_path, flags, own, on):
    file = tmp_path / "config.yaml"
    file.write_text(HEAD + (OWN + own + "\n" if own else ""))
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", f"--config={file}", *flags)
    assert result.exit_code == 0, result.output
    told = served[0][0]
    assert told.own.parts.proxy is on
    assert told.own_configuration["parts"] == {**msgspec.structs.asdict(NodeParts()), "proxy": on}
    assert ("parts.proxy" in result.output) == (
        bool(flags) and "proxy:" in own and f"--{'' if on else 'no-'}proxy" not in flags
    )


def test_a_node_without_parts_says_so(tmp_path):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", "--no-proxy")
    assert result.exit_code == 1
    assert "every part is switched off, so there is nothing to do: switch one on" in result.output


def test_something_to_follow_is_needed(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = call("--hostname-override=a")
    assert result.exit_code == 2
    assert "use --kubeconfig, --master, or --manifests" in result.output


def test_an_api_server_is_followed_anew_at_each_start(served):
    assert call("--hostname-override=a", "--master=http://127.0.0.1:8080").exit_code == 0
    _, origin = served[0]
    first, second = origin(), origin()
    assert first.creator is not None
    assert first.source is not second.source


def test_what_keeps_it_from_starting_is_said(monkeypatch, served, tmp_path):
    def refuse(*_):
        raise StartError("the port is\ntaken")

    monkeypatch.setattr(node_process, "serve_node", refuse)
    result = call(f"--manifests={tmp_path}", "--hostname-override=a")
    assert result.exit_code == 1
    assert r"Error: the port is\ntaken" in result.output
    assert served == []


@pytest.mark.parametrize("command", ["node", "proxy"])
def test_each_fault_of_the_file_has_a_line(served, tmp_path, command):
    file = tmp_path / "config.yaml"
    file.write_text(f"{HEAD}{OWN}dns: {{addresses: [foo]}}\noverlay: {{publicIPs: [x]}}\n")
    result = CliRunner().invoke(main, [command, f"--manifests={tmp_path}", f"--config={file}"])
    assert result.exit_code == 1 and not served
    lines = result.stderr.splitlines()
    assert [line.rpartition(": NarthexConfiguration: ")[2].partition(":")[0] for line in lines] == [
        "overlay.publicIPs[0]",
        "dns.addresses[0]",
    ]
