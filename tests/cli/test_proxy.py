"""From flags to settings; nothing is started here."""

import msgspec
import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.proxy.program import start
from narthex.runtime.configuration.values import (
    ClientConnection,
    IpvsConfiguration,
    LoggingConfiguration,
    OwnConfiguration,
)


@pytest.fixture
def served(monkeypatch):
    """Catches what would be served."""
    caught = []
    monkeypatch.setattr(
        start, "serve", lambda settings, origin, _file, _verifiers=None: caught.append((settings, origin.source))
    )
    return caught


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


@pytest.mark.row("27.4", "27.24", "27.27")
def test_all_of_kube_proxys_flags(served, tmp_path):
    """Written as people write them for a Go program."""
    result = call(
        f"--manifests={tmp_path}",
        "--hostname_override=a",
        "--proxy-mode=ipvs",
        "--kubeconfig=/k",
        "--kube-api-qps=7.5",
        "--kube-api-burst=9",
        "--kube-api-content-type=application/json",
        "--iptables-masquerade-bit=15",
        "--masquerade-all=true",
        "--iptables-localhost-nodeports=false",
        "--ipvs-sync-period=20s",
        "--ipvs-min-sync-period=2s",
        "--ipvs-scheduler=lc",
        "--ipvs-exclude-cidrs=10.0.0.0/8,fd00::/8",
        "--ipvs-strict-arp",
        "--ipvs-tcp-timeout=1m",
        "--ipvs-tcpfin-timeout=2m",
        "--ipvs-udp-timeout=3m",
        "--conntrack-min=7",
        "--config-sync-period=1m",
        "--oom-score-adj=-5",
        "--feature-gates=AllowServiceExternalIPs=false,Other=true",
        "--profiling=false",
        "--show-hidden-metrics-for-version=1.35",
        "--proxy-port-range=1-2",
        "--windows-run-as-service=false",
        "--network-name=",
        "--source-vip=",
        "--enable-dsr=false",
        "--root-hnsendpoint-name=",
        "--forward-healthcheck-vip=false",
        "-v=3",
        "--vmodule=sync=5,feed*=4",
        "--logging-format=json",
        "--log-flush-frequency=1s",
        "--strict-source-ranges",
        "--explain-service=shop/web",
        "--connection-metrics=services",
    )
    assert result.exit_code == 0, result.output
    ((told, _),) = served
    assert told.node.node_name == "a"
    assert (told.node.masquerade_all, told.node.masquerade_bit) == (True, 15)
    assert told.node.strict_source_ranges
    assert not told.node.allow_service_external_ips
    assert (told.periods.minimum, told.periods.sync) == (2.0, 20.0)
    assert told.client == ClientConnection(kubeconfig="/k", content_type="application/json", qps=7.5, burst=9)
    assert told.ipvs == IpvsConfiguration(
        sync_period=20.0,
        min_sync_period=2.0,
        scheduler="lc",
        exclude_cidrs=("10.0.0.0/8", "fd00::/8"),
        strict_arp=True,
        tcp_timeout=60.0,
        tcp_fin_timeout=120.0,
        udp_timeout=180.0,
    )
    assert told.conntrack.min == 7
    assert told.oom_score_adj == -5
    assert told.logging == LoggingConfiguration(
        format="json", verbosity=3, vmodule=(("sync", 5), ("feed*", 4)), flush_frequency=1.0
    )
    assert told.own == OwnConfiguration(
        strict_source_ranges=True, explain_service="shop/web", connection_metrics="services"
    )
    assert told.configuration["configSyncPeriod"] == "1m0s"
    assert told.configuration["iptables"]["localhostNodePorts"] is False


@pytest.mark.row("27.3")
@pytest.mark.parametrize("flag", ["--v=4", "-v=4", "-v4", "--verbosity=4"])
def test_for_logging_the_flag_wins(served, tmp_path, flag):
    file = tmp_path / "config.yaml"
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    file.write_text(head + "logging: {format: json, verbosity: 1}\n")
    assert call(f"--manifests={tmp_path}", f"--config={file}", "--hostname-override=a", flag).exit_code == 0
    ((told, _),) = served
    assert (told.logging.format, told.logging.verbosity) == ("json", 4)


@pytest.mark.row("27.6")
@pytest.mark.parametrize(
    ("flags", "healthz", "metrics"),
    [
        (["--healthz-port=0", "--metrics-port=0"], None, None),
        (["--healthz-port=7", "--metrics-port=8"], ("0.0.0.0", 7), ("127.0.0.1", 8)),
        (["--healthz-port=7", "--healthz-bind-address=10.0.0.1"], ("10.0.0.1", 7), ("127.0.0.1", 10249)),
        (["--healthz-port=7", "--healthz-bind-address=10.0.0.1:9"], ("10.0.0.1", 9), ("127.0.0.1", 10249)),
        (["--bind-address=fd20::11", "--metrics-port=8"], ("::", 10256), ("::1", 8)),
    ],
)
def test_the_older_flags_for_ports(served, tmp_path, flags, healthz, metrics):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", *flags)
    assert result.exit_code == 0, result.output
    assert (served[0][0].healthz, served[0][0].metrics) == (healthz, metrics)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--v=x", "'x' is not a non-negative number"),
        ("--feature-gates=A", "'A' is not of the form name=value"),
        ("--feature-gates=A=maybe", "A=maybe: must be true or false"),
        ("--vmodule=a=b", "a=b: must be a number"),
        ("--explain-service=web", "explainService 'web' is not the namespace and name"),
        ("--connection-metrics=all", "connectionMetrics 'all' is not endpoints, services or off"),
        ("--healthz-bind-address=here", "healthzBindAddress 'here' is not an address"),
        ("--metrics-bind-address=[::1", "metricsBindAddress '[::1' is not an address"),
        ("--oom-score-adj=1001", "oomScoreAdj 1001 is not a number in range"),
    ],
)
@pytest.mark.usefixtures("served")
def test_a_wrong_flag_says_what_is_wrong(tmp_path, flag, said):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", flag)
    assert result.exit_code != 0
    assert said in result.output


@pytest.mark.row("27.26")
def test_the_configuration_can_be_written_and_read_again(served, tmp_path):
    file = tmp_path / "written.yaml"
    flags = ["--cluster-cidr=10.64.0.0/12", "--proxy-mode=iptables", "--strict-source-ranges", "--v=2"]
    result = call("--write-config-to", str(file), *flags)
    assert result.exit_code == 0, result.output
    assert served == []
    written = file.read_text()
    for name in ("conntrack:", "tcpEstablishedTimeout: 24h0m0s", "mode: iptables", "strictSourceRanges: true"):
        assert name in written
    assert call(f"--manifests={tmp_path}", f"--config={file}", "--hostname-override=a").exit_code == 0
    assert call(f"--manifests={tmp_path}", *flags, "--hostname-override=a").exit_code == 0
    from_file, from_flags = served[0][0], served[1][0]
    assert msgspec.structs.replace(from_file, configuration={}) == msgspec.structs.replace(from_flags, configuration={})


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    result = call("--write-config-to", str(tmp_path / "no" / "file"))
    assert result.exit_code == 1
    assert "cannot write" in result.output and "No such file" in result.output


def test_local_mode_flags(served, tmp_path):
    result = call(
        f"--manifests={tmp_path}",
        "--hostname-override=a",
        "--detect-local-mode=InterfaceNamePrefix",
        "--pod-interface-name-prefix=veth",
    )
    assert result.exit_code == 0, result.output
    assert served[0][0].node.interface_name_prefix == "veth"


@pytest.mark.usefixtures("served")
def test_something_to_follow_is_needed(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    result = call("--hostname-override=a")
    assert result.exit_code == 2
    assert "use --kubeconfig, --master, or --manifests" in result.output


def test_manifests_need_no_kubeconfig(served, tmp_path):
    assert call(f"--kubeconfig={tmp_path}/nope", f"--manifests={tmp_path}").exit_code == 0
    assert len(served) == 1


@pytest.mark.parametrize("flag", ["--kubeconfig={k}", "--master=http://127.0.0.1:8080"])
def test_an_api_server_is_followed(served, flag, tmp_path):
    (tmp_path / "k").write_text("clusters: []")
    assert call("--hostname-override=a", flag.format(k=tmp_path / "k")).exit_code == 0
    ((_, source),) = served
    assert [each.kind for each in source.followed] == ["Service", "EndpointSlice", "Node", "ServiceCIDR"]


@pytest.mark.usefixtures("served")
def test_settings_that_cannot_be_used_end_it_with_a_clear_word(tmp_path):
    result = call(f"--manifests={tmp_path}", "--hostname-override=a", "--proxy-mode=chains")
    assert result.exit_code == 1
    assert "Error: command line: mode 'chains' is not nftables, iptables, ipvs or userspace" in result.output


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
