"""kube-proxy's configuration file, field by field."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.duration import duration, duration_text
from narthex.proxy.plan.planner import NodeConfig
from narthex.proxy.program.settings import node_config
from narthex.runtime.configuration.file import ConfigurationError, ProxyConfiguration, file_text, parse, read
from narthex.runtime.configuration.values import (
    AnnouncerConfiguration,
    ClientConnection,
    CniConfiguration,
    ConntrackConfiguration,
    DnsConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    ModeConfiguration,
    NodeParts,
    OverlayConfiguration,
    OwnConfiguration,
    WinkernelConfiguration,
)

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


OWN_HEAD = "---\napiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\n"


def good(body: str, *warnings: str) -> ProxyConfiguration:
    configuration, problems = parse((HEAD + body).encode(), "proxy.yaml")
    assert [problem.field for problem in problems] == list(warnings)
    return configuration


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


def test_other_documents_of_the_file():
    """kubeadm keeps its own configuration in the same file."""
    text = "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\n---\n" + HEAD + "mode: iptables\n"
    configuration, problems = parse(text.encode(), "proxy.yaml")
    assert configuration.mode == "iptables"
    assert [problem.severity for problem in problems] == ["warning"]


def test_our_own_document():
    text = (
        HEAD + "mode: iptables\n" + OWN_HEAD + "strictSourceRanges: true\nexplainService: shop/web\n"
        "connectionMetrics: services\nconnectionSeries: 5\nparts: {cni: true}\n"
        "cni: {socket: /run/a.sock, stateDirectory: /var/lib/b}\n"
        "overlay: {netConf: /etc/a.json, subnetFile: /run/b.env, interfaces: [eth1], interfacePatterns: ['10\\.0'],\n"
        "  interfaceCanReach: 192.0.2.9, publicIPs: [198.51.100.1], masquerade: false, forwardRules: false,\n"
        "  annotationPrefix: my.example/net, networkCondition: false, repairChecksums: false}\n"
        "dns: {addresses: [10.96.0.10], listen: [192.0.2.1], zones: [Cluster.Local], upstreams: []}\n"
        "announcer: {keyFile: /etc/key, port: 7000, poolsFile: /etc/pools, excludeInterfaces: [], ignoreExcludeLabel: true}\n"
    )
    configuration, problems = parse(text.encode(), "proxy.yaml")
    assert problems == ()
    assert configuration.own == OwnConfiguration(
        strict_source_ranges=True,
        explain_service="shop/web",
        connection_metrics="services",
        connection_series=5,
        parts=NodeParts(cni=True),
        cni=CniConfiguration(socket="/run/a.sock", state_directory="/var/lib/b"),
        overlay=OverlayConfiguration(
            net_conf="/etc/a.json",
            subnet_file="/run/b.env",
            interfaces=("eth1",),
            interface_patterns=(r"10\.0",),
            interface_can_reach="192.0.2.9",
            public_ips=("198.51.100.1",),
            masquerade=False,
            forward_rules=False,
            annotation_prefix="my.example/net",
            network_condition=False,
            repair_checksums=False,
        ),
        announcer=AnnouncerConfiguration(
            key_file="/etc/key", port=7000, pools_file="/etc/pools", exclude_interfaces=(), ignore_exclude_label=True
        ),
        dns=DnsConfiguration(addresses=("10.96.0.10",), listen=("192.0.2.1",), zones=("cluster.local.",), upstreams=()),
    )
    assert node_config(configuration, "", "a").strict_source_ranges
    assert good("").own == OwnConfiguration()
    with pytest.raises(ConfigurationError, match="holds no document"):
        parse(OWN_HEAD.encode(), "proxy.yaml")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("explainService: web", "explainService: 'web' is not the namespace and name of a Service, such as shop/web"),
        ("explainService: 'a/b\\n'", "is not the namespace and name of a Service"),
        ("connectionMetrics: some", "connectionMetrics: 'some' is not endpoints, services or off"),
        ("connectionSeries: -1", "connectionSeries: -1 is not a number in range (0-1000000)"),
        ("strictSourceRanges: 1", "strictSourceRanges: 1 is a number, must be true or false"),
        ("parts: {cni: yes-please}", "parts.cni: 'yes-please' is text, must be true or false"),
        ("cni: {socket: cni.sock}", "cni.socket: 'cni.sock' is not an absolute path, such as /var/lib/narthex"),
        ("dns: {addresses: [kube-dns]}", "dns.addresses"),
        ("dns: {zones: ['a b']}", "dns.zones"),
        ("dns: {upstreams: ['1.1.1.1 }']}", "neither an address nor the path of a resolv.conf"),
        ("dns: {corefile: Corefile}", "dns.corefile: 'Corefile' is not an absolute path"),
        ("announcer: {keyFile: key}", "announcer.keyFile: 'key' is not an absolute path"),
        ("announcer: {port: 0}", "announcer.port: 0 is not a number in range (1-65535)"),
        (
            "announcer: {excludeInterfaces: ['']}",
            "announcer.excludeInterfaces[0]: '' is not a pattern of interface names",
        ),
        ("overlay: {netConf: a.json}", "overlay.netConf: 'a.json' is not an absolute path"),
        ("overlay: {interfacePatterns: ['(']}", "'(' is not a regular expression: missing )"),
        ("overlay: {publicIPs: [node-1]}", "overlay.publicIPs"),
        ("overlay: {annotationPrefix: a b}", "overlay.annotationPrefix: 'a b' is not an annotation prefix"),
        (f"cni: {{socket: /{'a' * 107}}}", "is longer than the 107 bytes that a socket's path may have"),
    ],
)
def test_faults_of_our_own_document_have_their_line(body, said):
    with pytest.raises(ConfigurationError) as caught:
        parse((HEAD + OWN_HEAD + body + "\n").encode(), "proxy.yaml")
    (problem,) = caught.value.problems
    assert str(problem).startswith("proxy.yaml:6: error: NarthexConfiguration: ")
    assert said in str(problem)


def test_our_own_document_has_a_version_and_is_there_once():
    with pytest.raises(ConfigurationError, match="'narthex/v9' is not narthex/v1alpha1"):
        parse((HEAD + OWN_HEAD.replace("v1alpha1", "v9")).encode(), "proxy.yaml")
    with pytest.raises(ConfigurationError, match="NarthexConfiguration: is there twice, first in line"):
        parse((HEAD + OWN_HEAD + OWN_HEAD).encode(), "proxy.yaml")
    _, problems = parse((HEAD + OWN_HEAD + "colour: red\n").encode(), "proxy.yaml")
    assert [problem.field for problem in problems] == ["colour"]


seconds = st.integers(0, 10**15).map(lambda nanoseconds: nanoseconds / 1e9)
words = st.text("abcdefgh-/.:", max_size=8)
configurations = st.builds(
    ProxyConfiguration,
    mode=st.sampled_from(["nftables", "iptables", "ipvs", "userspace"]),
    feature_gates=st.dictionaries(st.text("ABCab", min_size=1, max_size=5), st.booleans(), max_size=3).map(
        lambda gates: tuple(sorted(gates.items()))
    ),
    client_connection=st.builds(ClientConnection, kubeconfig=words, qps=st.floats(0.5, 1e6), burst=st.integers(1, 99)),
    logging=st.builds(
        LoggingConfiguration,
        format=st.sampled_from(["text", "json"]),
        verbosity=st.integers(0, 10),
        vmodule=st.lists(st.tuples(words, st.integers(0, 9)), max_size=2).map(tuple),
        flush_frequency=seconds,
    ),
    healthz_bind_address=st.sampled_from(["0.0.0.0:10256", "[::1]:7", "10.0.0.1:99"]),
    iptables=st.builds(
        ModeConfiguration,
        masquerade_bit=st.integers(0, 31),
        masquerade_all=st.booleans(),
        localhost_node_ports=st.booleans(),
    ),
    ipvs=st.builds(
        IpvsConfiguration,
        scheduler=st.sampled_from(["", "rr", "mh"]),
        tcp_timeout=seconds,
        exclude_cidrs=st.just(("10.0.0.0/8",)),
    ),
    winkernel=st.builds(
        WinkernelConfiguration, network_name=words, enable_dsr=st.booleans(), root_hns_endpoint_name=words
    ),
    cluster_cidrs=st.sampled_from([(), ("10.64.0.0/12",), ("10.64.0.0/12", "fd64::/48")]),
    node_port_addresses=st.sampled_from(
        [None, ("primary",), ("10.0.0.0/8", "fd20::/64"), ("all",), ("10.0.0.0/8", "localhost", "primary")]
    ),
    oom_score_adj=st.integers(-1000, 1000),
    conntrack=st.builds(ConntrackConfiguration, max_per_core=st.integers(0, 9), tcp_established_timeout=seconds),
    bind_address_hard_fail=st.booleans(),
    own=st.builds(
        OwnConfiguration,
        strict_source_ranges=st.booleans(),
        strict_node_port_addresses=st.booleans(),
        explain_service=st.sampled_from(["", "shop/web"]),
        connection_metrics=st.sampled_from(["endpoints", "services", "off"]),
        connection_series=st.integers(0, 1000),
    ),
)


@pytest.mark.row("27.26")
@given(configurations)
def test_what_is_written_reads_as_the_same(configuration):
    read_again, problems = parse(file_text(configuration).encode(), "proxy.yaml")
    assert read_again == configuration
    assert not [problem for problem in problems if "not a known field" in problem.message]


@given(st.integers(0, 10**17))
def test_durations_are_written_as_they_are_read(nanoseconds):
    text = duration_text(nanoseconds / 1e9)
    assert duration(text) == pytest.approx(nanoseconds / 1e9, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("given_seconds", "text"),
    [
        (0, "0s"), (30, "30s"), (90, "1m30s"), (4500, "1h15m0s"), (86400, "24h0m0s"), (0.25, "250ms"), (1.5, "1.5s"),
        (5e-9, "5ns"), (1.5e-6, "1.5µs"), (3600.001, "1h0m0.001s"),
    ],
)  # fmt: skip
def test_durations_as_go_writes_them(given_seconds, text):
    assert duration_text(given_seconds) == text


@pytest.mark.parametrize(
    ("body", "mode", "expected"),
    [
        ("", "", NodeConfig(node_name="a", node_port_addresses=("primary",), bind_address="0.0.0.0")),
        ("", "nftables", NodeConfig(node_name="a", node_port_addresses=("primary",), bind_address="0.0.0.0")),
        ("", "iptables", NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0")),
        ("mode: iptables", "", NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0")),
        ("", "ipvs", NodeConfig(node_name="a", bind_address="0.0.0.0")),
        (
            "nodePortAddresses: [10.0.0.0/8]\nnftables: {masqueradeAll: true, masqueradeBit: 5}\nclusterCIDR: 10.64.0.0/12",
            "nftables",
            NodeConfig(
                node_name="a",
                cluster_cidrs=("10.64.0.0/12",),
                node_port_addresses=("10.0.0.0/8",),
                masquerade_all=True,
                masquerade_bit=5,
                bind_address="0.0.0.0",
            ),
        ),
        (
            "nftables: {masqueradeAll: true, masqueradeBit: 5}\niptables: {localhostNodePorts: false}",
            "iptables",
            NodeConfig(node_name="a", bind_address="0.0.0.0"),
        ),
        (
            "iptables: {masqueradeAll: true, masqueradeBit: 5}",
            "ipvs",
            NodeConfig(node_name="a", masquerade_all=True, masquerade_bit=5, bind_address="0.0.0.0"),
        ),
        (
            "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}\nbindAddress: 10.20.0.11\n"
            "featureGates: {AllowServiceExternalIPs: false}",
            "ipvs",
            NodeConfig(
                node_name="a",
                detect_local_mode="BridgeInterface",
                bridge_interface="cni0",
                bind_address="10.20.0.11",
                allow_service_external_ips=False,
            ),
        ),
        (
            "nodePortAddresses: [localhost]\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: true, KubeProxyIPVS: false}",
            "nftables",
            NodeConfig(
                node_name="a", node_port_addresses=("localhost",), relayed_node_ports=True, bind_address="0.0.0.0"
            ),
        ),
        (
            "featureGates: {KubeProxyNFTablesLocalhostNodePorts: true}",
            "iptables",
            NodeConfig(node_name="a", localhost_node_ports=True, bind_address="0.0.0.0"),
        ),
    ],
)
def test_node_config(body, mode, expected):
    assert node_config(good(body), mode, "a") == expected


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1h15m0s", 4500),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("1us", 1e-6),
        ("1µs", 1e-6),
        ("5ns", 5e-9),
        ("0", 0),
    ],
)
def test_durations(text, seconds):
    assert duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "30", "s", "1x", "1 s", "1s ", "١s", "1" * 70 + "s", "1e3s", "--1s"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="is not a duration"):
        duration(text)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "mode", "featureGates", "clientConnection", "logging", "hostnameOverride", "bindAddress", "healthzBindAddress",
    "iptables", "ipvs", "nftables", "detectLocal", "detectLocalMode", "clusterCIDR", "nodePortAddresses", "conntrack",
    "oomScoreAdj", "configSyncPeriod", "showHiddenMetricsForVersion", "winkernel",
]  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=4))
def test_any_value_in_any_field(raw):
    import json

    text = json.dumps({"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", **raw})
    try:
        configuration, problems = parse(text.encode(), "proxy.yaml")
    except ConfigurationError as error:
        problems = error.problems
    else:
        node_config(configuration, "", "a")
    assert all(str(problem).isprintable() for problem in problems)


@given(st.binary(max_size=100))
def test_any_bytes(data):
    with pytest.raises(ConfigurationError):
        parse(data, "proxy.yaml")


@pytest.mark.row("6.9", "27.15")
@pytest.mark.parametrize("body", ["", 'detectLocalMode: ""\n', "detectLocalMode: null\n"])
def test_without_a_detection_mode_it_is_cluster_cidr(body):
    assert good(body).detect_local_mode == "ClusterCIDR"
