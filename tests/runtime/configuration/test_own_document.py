"""The project's own document of a configuration file."""

import pytest
from tests.runtime.configuration.documents import HEAD, good

from narthex.proxy.program.settings import node_config
from narthex.runtime.configuration.file import ConfigurationError, parse
from narthex.runtime.configuration.values import (
    AnnouncerConfiguration,
    CniConfiguration,
    DnsConfiguration,
    NodeParts,
    OverlayConfiguration,
    OwnConfiguration,
)

OWN_HEAD = "---\napiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\n"


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
        ("socketLoadBalancingCgroup: pods", "socketLoadBalancingCgroup: 'pods' is not an absolute path"),
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


def test_sockets_are_balanced_in_mode_nftables_only():
    body = OWN_HEAD + "socketLoadBalancing: true\nsocketLoadBalancingCgroup: /sys/fs/cgroup/pods\n"
    configuration, problems = parse((HEAD + body).encode(), "proxy.yaml")
    assert problems == () and configuration.own.socket_load_balancing
    assert configuration.own.socket_load_balancing_cgroup == "/sys/fs/cgroup/pods"
    with pytest.raises(ConfigurationError) as caught:
        parse((HEAD + "mode: iptables\n" + body).encode(), "proxy.yaml")
    (problem,) = caught.value.problems
    assert "socketLoadBalancing: works in mode nftables only, not in mode iptables: remove it" in str(problem)


def test_endpoints_are_ejected_with_socket_load_balancing_only():
    configuration, problems = parse(
        (HEAD + OWN_HEAD + "socketLoadBalancing: true\nendpointEjection: true\n").encode(), "a"
    )
    assert problems == () and configuration.own.endpoint_ejection
    with pytest.raises(ConfigurationError) as caught:
        parse((HEAD + OWN_HEAD + "endpointEjection: true\n").encode(), "proxy.yaml")
    (problem,) = caught.value.problems
    assert "endpointEjection: needs socketLoadBalancing: true" in str(problem)
