"""kube-proxy's configuration file, field by field."""

import pytest
from tests.runtime.configuration.documents import HEAD, good

from narthex.runtime.configuration.file import ConfigurationError, ProxyConfiguration, parse, read
from narthex.runtime.configuration.values import (
    ClientConnection,
    ConntrackConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    ModeConfiguration,
    WinkernelConfiguration,
)


def faults(body: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse((HEAD + body).encode(), "proxy.yaml")
    return [str(problem) for problem in caught.value.problems if problem.severity == "error"]


EVERY_FIELD = tuple(f"27.{number}" for number in range(1, 23))


@pytest.mark.row(*EVERY_FIELD)
def test_defaults():
    assert good("") == ProxyConfiguration()
    assert good("mode: ''\nclusterCIDR: ''\niptables: null\nconntrack: {}\n") == ProxyConfiguration()


def test_what_kubeadm_writes():
    body = """
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"""
    assert good(body) == ProxyConfiguration(
        client_connection=ClientConnection(kubeconfig="/var/lib/kube-proxy/kubeconfig.conf"),
        cluster_cidrs=("10.244.0.0/16",),
        logging=LoggingConfiguration(flush_frequency=0.0),
    )


@pytest.mark.row(*EVERY_FIELD)
def test_all_fields():
    body = """
mode: iptables
clientConnection: {kubeconfig: /k, acceptContentTypes: a, contentType: application/json, qps: 2.5, burst: 7}
logging: {format: json, verbosity: 4, flushFrequency: 2s, vmodule: [{filePattern: proxy*, verbosity: 5}]}
hostnameOverride: " Worker-A "
bindAddress: "FD20::11"
bindAddressHardFail: true
enableProfiling: true
showHiddenMetricsForVersion: "1.35"
iptables: {masqueradeBit: 15, masqueradeAll: true, localhostNodePorts: false, syncPeriod: 1m, minSyncPeriod: 500ms}
nftables: {masqueradeBit: 3, masqueradeAll: true, syncPeriod: 1h15m0s, minSyncPeriod: 2s}
ipvs:
  {syncPeriod: 10s, minSyncPeriod: 1s, scheduler: mh, excludeCIDRs: [10.0.0.1/8], strictARP: true, tcpTimeout: 1s,
   tcpFinTimeout: 2s, udpTimeout: 3s}
winkernel: {networkName: n, sourceVip: v, enableDSR: true, rootHnsEndpointName: r, forwardHealthCheckVip: true}
windowsRunAsService: true
detectLocalMode: InterfaceNamePrefix
detectLocal: {bridgeInterface: cni0, interfaceNamePrefix: veth}
clusterCIDR: "10.64.0.0/12, fd64::/48"
nodePortAddresses: [10.20.0.0/24, "fd20::/64"]
oomScoreAdj: -1000
conntrack:
  {maxPerCore: 0, min: 5, tcpEstablishedTimeout: 1h, tcpCloseWaitTimeout: 0s, tcpBeLiberal: true, udpTimeout: 30s,
   udpStreamTimeout: 300s}
configSyncPeriod: 1m
portRange: 1-2
featureGates: {AllowServiceExternalIPs: false}
"""
    ignored = ("winkernel", "windowsRunAsService", "portRange")
    assert good(body, *ignored) == ProxyConfiguration(
        mode="iptables",
        feature_gates=(("AllowServiceExternalIPs", False),),
        client_connection=ClientConnection(
            kubeconfig="/k", accept_content_types="a", content_type="application/json", qps=2.5, burst=7
        ),
        logging=LoggingConfiguration(format="json", verbosity=4, vmodule=(("proxy*", 5),), flush_frequency=2.0),
        hostname_override="worker-a",
        bind_address="fd20::11",
        healthz_bind_address="[::]:10256",
        metrics_bind_address="[::1]:10249",
        bind_address_hard_fail=True,
        enable_profiling=True,
        show_hidden_metrics_for_version="1.35",
        iptables=ModeConfiguration(
            masquerade_bit=15, masquerade_all=True, localhost_node_ports=False, sync_period=60.0, min_sync_period=0.5
        ),
        nftables=ModeConfiguration(
            masquerade_bit=3, masquerade_all=True, localhost_node_ports=False, sync_period=4500.0, min_sync_period=2.0
        ),
        ipvs=IpvsConfiguration(
            sync_period=10.0,
            min_sync_period=1.0,
            scheduler="mh",
            exclude_cidrs=("10.0.0.0/8",),
            strict_arp=True,
            tcp_timeout=1.0,
            tcp_fin_timeout=2.0,
            udp_timeout=3.0,
        ),
        winkernel=WinkernelConfiguration(
            network_name="n", source_vip="v", enable_dsr=True, root_hns_endpoint_name="r", forward_health_check_vip=True
        ),
        windows_run_as_service=True,
        detect_local_mode="InterfaceNamePrefix",
        bridge_interface="cni0",
        interface_name_prefix="veth",
        cluster_cidrs=("10.64.0.0/12", "fd64::/48"),
        node_port_addresses=("10.20.0.0/24", "fd20::/64"),
        oom_score_adj=-1000,
        conntrack=ConntrackConfiguration(
            max_per_core=0,
            min=5,
            tcp_established_timeout=3600.0,
            tcp_close_wait_timeout=0.0,
            tcp_be_liberal=True,
            udp_timeout=30.0,
            udp_stream_timeout=300.0,
        ),
        config_sync_period=60.0,
        port_range="1-2",
    )


@pytest.mark.parametrize(
    ("text", "healthz"),
    [("1.2.3.4", "1.2.3.4:10256"), ("1.2.3.4:99", "1.2.3.4:99"), ("::", "[::]:10256"), ("[::1]:99", "[::1]:99")],
)
def test_bind_addresses(text, healthz):
    assert good(f"healthzBindAddress: '{text}'").healthz_bind_address == healthz


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("mode: fast", "proxy.yaml:3: error: KubeProxyConfiguration: mode: 'fast' is not nftables, iptables, ipvs or userspace"),
        ("mode: kernelspace", "mode: 'kernelspace' is for Windows"),
        ("mode: 1", "mode: 1 is a number, must be text"),
        ("clusterCIDR: 10.0.0.0", "clusterCIDR: '10.0.0.0' is not a CIDR"),
        ("clusterCIDR: 10.0.0.0/8,11.0.0.0/8", "must be one CIDR, or one of each IP family"),
        ("clusterCIDR: [10.0.0.0/8]", "clusterCIDR: is a list, must be text"),
        ("detectLocalMode: Magic", "'Magic' is not ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix"),
        ("detectLocalMode: BridgeInterface", "detectLocal.bridgeInterface: is required for detectLocalMode Bridge"),
        ("detectLocalMode: InterfaceNamePrefix", "detectLocal.interfaceNamePrefix: is required"),
        ("detectLocal:\n  bridgeInterface: 'a b'", "proxy.yaml:4: error: KubeProxyConfiguration: detectLocal.bridgeInterface"),
        ("detectLocal: {interfaceNamePrefix: veth*}", "'veth*' is not (the beginning of) an interface name"),
        ("detectLocal: {interfaceNamePrefix: 'x\" accept #'}", "is not (the beginning of) an interface name"),
        ("detectLocal: {bridgeInterface: interface-too-long}", "is not (the beginning of) an interface name"),
        ("nodePortAddresses: [10.0.0.1]", "nodePortAddresses[0]: '10.0.0.1' is not a CIDR"),
        ("nodePortAddresses: primary", "nodePortAddresses: 'primary' is text, must be a list"),
        ("nodePortAddresses: [1]", "nodePortAddresses[0]: 1 is a number, must be text"),
        ("iptables: {masqueradeBit: 32}", "iptables.masqueradeBit: 32 is not a number in range (0-31)"),
        ("nftables: {masqueradeBit: -1}", "nftables.masqueradeBit: -1 is not a number in range (0-31)"),
        ("iptables: {masqueradeAll: 1}", "iptables.masqueradeAll: 1 is a number, must be true or false"),
        ("iptables: {localhostNodePorts: 'no'}", "iptables.localhostNodePorts: 'no' is text, must be true or false"),
        ("iptables: {syncPeriod: 30}", 'iptables.syncPeriod: 30 is a number, must be a duration in quotes, such as "30s"'),
        ("iptables: {syncPeriod: -1s}", "iptables.syncPeriod: '-1s' is negative"),
        ("iptables: {syncPeriod: 1s, minSyncPeriod: 2s}", "must not be longer than iptables.syncPeriod (1s)"),
        ("ipvs: {scheduler: 'rr; reboot'}", "is not an IPVS scheduler"),
        ("ipvs: {excludeCIDRs: [x]}", "ipvs.excludeCIDRs[0]: 'x' is not a CIDR"),
        ("ipvs: []", "ipvs: is a list, must be a mapping"),
        ("conntrack: {min: -1}", "conntrack.min: -1 is not a number in range"),
        ("conntrack: {udpTimeout: soon}", "conntrack.udpTimeout: 'soon' is not a duration such as 30s"),
        ("oomScoreAdj: 1001", "oomScoreAdj: 1001 is not a number in range (-1000-1000)"),
        ("oomScoreAdj: true", "oomScoreAdj: true is true or false, must be a whole number"),
        ("bindAddress: here", "bindAddress: 'here' is not an IP address"),
        ("healthzBindAddress: 1.2.3.4:0", "healthzBindAddress: '1.2.3.4:0' is not an address with or without a port"),
        ("metricsBindAddress: localhost:1", "metricsBindAddress: 'localhost:1' is not an address"),
        ("hostnameOverride: 'a; b'", "hostnameOverride: 'a; b' is not the name of a Node"),
        ("showHiddenMetricsForVersion: v1", "showHiddenMetricsForVersion: 'v1' is not 1.35: only the previous minor"),
        ("featureGates: {Some: 1}", "featureGates.Some: 1 is a number, must be true or false"),
        ("featureGates: {'a b': true}", "featureGates: 'a b' is not the name of a feature gate"),
        (
            "mode: ipvs\nfeatureGates: {KubeProxyIPVS: false}",
            "mode: 'ipvs' is switched off by the feature gate KubeProxyIPVS: choose nftables, or set the gate",
        ),
        ("featureGates: []", "featureGates: is a list, must be a mapping"),
        ("clientConnection: {burst: -1}", "clientConnection.burst: -1 is not a number in range"),
        ("clientConnection: {qps: fast}", "clientConnection.qps: 'fast' is text, must be a number"),
        ("clientConnection: {qps: 2e+9}", "clientConnection.qps: 2000000000.0 is not a number between -1e9 and 1e9"),
        ("clientConnection: {qps: -2000000000}", "clientConnection.qps: -2000000000 is not a number between -1e9 and 1e9"),
        ("logging: {format: xml}", "logging.format: 'xml' is not text or json"),
        ("logging: {vmodule: a=1}", "logging.vmodule: is text, must be a list"),
        ("logging: {vmodule: [{verbosity: x}]}", "logging.vmodule[0].verbosity: 'x' is text, must be a whole number"),
        ("configSyncPeriod: -5s", "configSyncPeriod: '-5s' is negative"),
    ],
)  # fmt: skip
@pytest.mark.row(*EVERY_FIELD)
def test_faults(body, said):
    found = faults(body)
    assert len(found) == 1 and said in found[0], found


def test_all_faults_at_once():
    assert len(faults("mode: fast\nclusterCIDR: x\niptables: {masqueradeBit: 99}\n")) == 3


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "holds no document of apiVersion kubeproxy.config.k8s.io/v1alpha1"),
        (b"kind: Service\napiVersion: v1", "holds no document of"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"a: [", "not valid YAML"),
        (b"- a", "is a list, must be a mapping"),
        (HEAD.replace("v1alpha1", "v9").encode(), "apiVersion: 'kubeproxy.config.k8s.io/v9' is not"),
        ((HEAD + "---\n" + HEAD).encode(), "is there twice, first in line 1"),
        (b"#" * (1024 * 1024 + 1), "is larger than"),
    ],
)
def test_files_that_are_none(data, said):
    with pytest.raises(ConfigurationError, match=r"proxy\.yaml") as caught:
        parse(data, "proxy.yaml")
    assert said in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        read(tmp_path / "proxy.yaml")
    (tmp_path / "proxy.yaml").write_text(HEAD)
    assert read(tmp_path / "proxy.yaml") == (ProxyConfiguration(), ())


@pytest.mark.row("27.23")
def test_unknown_and_doubled_fields_are_warnings():
    body = "mode: iptables\nmode: nftables\ncolour: red\niptables: {shape: round}\n'b\\nad': 1\nfeatureGates: {Other: true}\n"
    configuration, problems = parse((HEAD + body).encode(), "proxy.yaml")
    assert configuration.mode == "nftables"
    assert [str(problem) for problem in problems] == [
        "proxy.yaml:4: warning: KubeProxyConfiguration: the key 'mode' is given twice, the last one counts",
        "proxy.yaml:8: warning: KubeProxyConfiguration: featureGates.Other: has no effect here",
        "proxy.yaml:5: warning: KubeProxyConfiguration: colour: is not a known field, ignored",
        "proxy.yaml:1: warning: KubeProxyConfiguration: 'b\\\\nad': is not a known field, ignored",
        "proxy.yaml:6: warning: KubeProxyConfiguration: iptables.shape: is not a known field, ignored",
    ]
