"""`narthex overlay`: what it is told becomes settings, and what it cannot use is named."""

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.overlay.interfaces import InterfaceSelection
from narthex.overlay.program import part
from narthex.overlay.program.loop import OverlaySettings, settings_of
from narthex.runtime import logs
from narthex.runtime.configuration.values import OverlayConfiguration


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with everything but the overlay itself; what it was given."""
    for name in ("KUBERNETES_SERVICE_HOST", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    given = []
    monkeypatch.setattr(logs, "start_logging", lambda *_: None)
    monkeypatch.setattr(part, "serve_overlay", lambda *told: given.append(told))

    def run(*arguments, manifests=True):
        source = ["--manifests", str(tmp_path)] if manifests else []
        result = CliRunner().invoke(main, ["overlay", *source, *arguments])
        return result, given[-1] if given else None

    return run


def test_flannels_options(run):
    result, (settings, origin, healthz) = run(
        *("--node", "a", "--net-config-path", "/etc/n.json", "--subnet-file", "/run/s.env", "--iface", "eth1"),
        *(
            "--iface",
            "eth2",
            "--iface-regex",
            "10\\..*",
            "--iface-can-reach",
            "192.0.2.9",
            "--public-ip",
            "198.51.100.1",
        ),
        *("--public-ipv6", "fd00::1", "--no-ip-masq", "--no-iptables-forward-rules", "--no-repair-checksums"),
        *("--no-set-node-network-unavailable", "--kube-annotation-prefix", "my.example/x", "--healthz-port", "8471"),
    )
    assert result.exit_code == 0, result.output
    assert settings == OverlaySettings(
        node="a",
        net_conf="/etc/n.json",
        subnet_file="/run/s.env",
        choice=InterfaceSelection(names=("eth1", "eth2"), patterns=("10\\..*",), can_reach="192.0.2.9"),
        public_ips=("198.51.100.1", "fd00::1"),
        masquerade=False,
        forward_rules=False,
        annotation_prefix="my.example/x",
        set_condition=False,
        repair_checksums=False,
    )
    assert origin.writes is None
    assert healthz == ("0.0.0.0", 8471)


def test_defaults_are_those_of_the_configuration(run, monkeypatch):
    monkeypatch.setenv("NODE_NAME", "worker-a")
    result, (settings, _, healthz) = run()
    assert result.exit_code == 0, result.output
    assert settings == settings_of(OverlayConfiguration(), "worker-a")
    assert healthz is None


def test_an_api_server(run):
    result, (_, origin, _) = run("--kube-api-url", "http://192.0.2.1", "--node", "a", manifests=False)
    assert result.exit_code == 0, result.output
    assert origin.writes is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--iface-regex", "("), "--iface-regex '(': missing )"),
        (("--public-ip", "me"), "--public-ip: 'me' is not an IP address"),
        (("--public-ip", "fd00::1"), "--public-ip: fd00::1 is not an address of IPv4"),
        (("--public-ipv6", "192.0.2.1"), "--public-ipv6: 192.0.2.1 is not an address of IPv6"),
        (("--iface-can-reach", "there"), "--iface-can-reach: 'there' is not an IP address"),
        (("--healthz-ip", "here", "--healthz-port", "1"), "--healthz-ip: 'here' is not an IP address"),
        (("--kube-annotation-prefix", "a b"), "--kube-annotation-prefix 'a b' is not an annotation prefix"),
        (("--master", "http://192.0.2.1"), "mutually exclusive"),
    ],
)
def test_what_cannot_be_used(run, arguments, said):
    result, given = run("--node", "a", *arguments)
    assert result.exit_code != 0
    assert said in result.output
    assert given is None


def test_nothing_to_follow(run):
    result, _ = run(manifests=False)
    assert result.exit_code == 2
    assert "no source of objects: use --kubeconfig, --master, or --manifests" in result.output
