"""Flags and file, and which of them counts."""

from pathlib import Path

import pytest

from narthex.model.net import FAMILIES, IPFamily
from narthex.proxy.program.settings import SettingsError, family_warnings, settings

CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(HEAD + text)
        return path

    return write


def of(flags=(), path=None, host="Worker-A"):
    return settings(dict(flags), path, host)


@pytest.mark.row("26.5", "27.10")
def test_defaults():
    told = of()
    assert told.mode == "nftables"
    assert told.node.node_name == "worker-a"
    assert told.node.node_port_addresses == ("primary",)
    assert (told.periods.minimum, told.periods.sync) == (0.0, 30.0)
    assert told.healthz == ("0.0.0.0", 10256)
    assert told.metrics == ("127.0.0.1", 10249)
    assert not told.bind_address_hard_fail


def test_flags_alone():
    section = {"masqueradeAll": True, "syncPeriod": "5s", "minSyncPeriod": "100ms"}
    told = of(
        {
            "mode": "iptables",
            "hostnameOverride": "node-7",
            "clusterCIDR": "10.64.0.0/12,fd64::/48",
            "nodePortAddresses": ["10.20.0.0/16"],
            "iptables": section,
            "nftables": section,
            "healthzBindAddress": "[::1]:1234",
            "bindAddressHardFail": True,
            "detectLocal": None,
        }
    )
    assert told.mode == "iptables"
    assert told.node.node_name == "node-7"
    assert told.node.cluster_cidrs == ("10.64.0.0/12", "fd64::/48")
    assert told.node.node_port_addresses == ("10.20.0.0/16",)
    assert told.node.masquerade_all
    assert told.node.localhost_node_ports
    assert (told.periods.minimum, told.periods.sync) == (0.1, 5.0)
    assert told.healthz == ("::1", 1234)
    assert told.bind_address_hard_fail


TOOLS = {
    # The mode is kubeadm's default, which is empty.
    "kubeadm": ({}, CONFIGURATIONS / "kubeadm.yaml", "nftables", "10.244.0.0/16", None),
    "kind": ({}, CONFIGURATIONS / "kind.yaml", "iptables", "10.244.0.0/16", 0),
    # k3s runs the proxy with flags.
    "k3s": (
        {
            "clusterCIDR": "10.42.0.0/16",
            "conntrack": {"maxPerCore": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
            "healthzBindAddress": "127.0.0.1",
            "mode": "iptables",
        },
        None,
        "iptables",
        "10.42.0.0/16",
        0,
    ),
}
"""Flags and files as tools that set clusters up make them: with mode, ranges, and conntrack.maxPerCore."""


@pytest.mark.parametrize("tool", TOOLS)
def test_clusters_of_other_tools(tool):
    flags, path, mode, cidrs, per_core = TOOLS[tool]
    told = of(flags, path, host="Node-1")
    assert (told.mode, told.node.node_name, told.node.cluster_cidrs) == (mode, "node-1", (cidrs,))
    assert told.node.detect_local_mode == "ClusterCIDR"
    assert told.node.node_port_addresses == (("primary",) if tool == "kubeadm" else None)
    assert told.healthz == ("127.0.0.1" if tool == "k3s" else "0.0.0.0", 10256)
    assert told.warnings == ()
    assert per_core is None or told.conntrack.max_per_core == per_core


def test_the_file_alone(file):
    told = of(
        path=file(
            "mode: nftables\nclusterCIDR: 10.64.0.0/12\nhostnameOverride: node-3\nbindAddressHardFail: true\n"
            "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}\n"
            "nftables: {masqueradeAll: true, syncPeriod: 1m, minSyncPeriod: 2s}\n"
            "metricsBindAddress: 0.0.0.0\nlogging: {format: json, verbosity: 4}\n"
        )
    )
    assert told.node.node_name == "node-3"
    assert (told.node.detect_local_mode, told.node.bridge_interface) == ("BridgeInterface", "cni0")
    assert told.node.masquerade_all
    assert (told.periods.minimum, told.periods.sync) == (2.0, 60.0)
    assert told.metrics == ("0.0.0.0", 10249)
    assert (told.logging.format, told.logging.verbosity) == ("json", 4)
    assert told.warnings == ()


@pytest.mark.row("27.24")
def test_the_file_wins_and_says_which_flag_it_beat(file):
    told = of(
        {"mode": "iptables", "clusterCIDR": "10.0.0.0/8", "nftables": {"masqueradeAll": True, "syncPeriod": "5s"}},
        file("mode: nftables\nnftables: {syncPeriod: 20s}\n"),
    )
    assert told.mode == "nftables"
    assert told.periods.sync == 20.0
    assert told.warnings == (
        "mode is 'nftables' in the configuration file, so the flag's 'iptables' is not used",
        "nftables.syncPeriod is '20s' in the configuration file, so the flag's '5s' is not used",
    )


def test_a_flag_counts_where_the_file_says_nothing(file):
    told = of(
        {"mode": "iptables", "clusterCIDR": "10.0.0.0/8", "nftables": {"masqueradeAll": True}},
        file("nftables: {syncPeriod: 20s}\n"),
    )
    assert told.mode == "iptables"
    assert told.node.cluster_cidrs == ("10.0.0.0/8",)


@pytest.mark.row("27.4", "15.9")
def test_the_name_of_the_node_is_the_flags_first(file):
    path = file("hostnameOverride: node-3\n")
    assert of({"hostnameOverride": " Node-9 "}, path).node.node_name == "node-9"
    assert of({}, path).node.node_name == "node-3"
    assert of({}, host=" Worker-A.Example.COM\n").node.node_name == "worker-a.example.com"


@pytest.mark.row("27.6", "20.24")
@pytest.mark.parametrize("value", ["", "0", "127.0.0.1:0", "[::]:0"])
def test_flags_can_switch_the_servers_off_and_the_file_cannot(file, value):
    told = of({"healthzBindAddress": value, "metricsBindAddress": value})
    assert told.healthz is None
    assert told.metrics is None
    assert of({"healthzBindAddress": value}, file("healthzBindAddress: 127.0.0.1\n")).healthz == ("127.0.0.1", 10256)
    assert of(path=file('healthzBindAddress: ""\n')).healthz == ("0.0.0.0", 10256)


@pytest.mark.row("27.24")
def test_what_kubeadm_leaves_empty_says_nothing(file):
    told = of(
        {"mode": "iptables", "conntrack": {"min": 7}, "healthzBindAddress": ""},
        file('mode: ""\nconntrack: {min: null, maxPerCore: null}\nhealthzBindAddress: ""\n'),
    )
    assert told.mode == "iptables"
    assert told.conntrack.min == 7
    assert told.healthz is None
    assert not [warning for warning in told.warnings if "the flag's" in warning]


def test_our_own_document_beats_flags_and_adds_to_them(file):
    own = "---\napiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\nconnectionMetrics: services\n"
    told = of(
        {"clusterCIDR": "10.0.0.0/8", "narthex": {"connectionMetrics": "off", "explainService": "shop/web"}}, file(own)
    )
    assert (told.own.connection_metrics, told.own.explain_service) == ("services", "shop/web")
    assert told.own_configuration["connectionMetrics"] == "services"
    (warning,) = told.warnings
    assert warning.startswith("narthex.connectionMetrics is 'services' in the configuration file")


def test_a_field_of_our_name_in_kube_proxys_document_is_none_of_ours(file):
    told = of({"clusterCIDR": "10.0.0.0/8"}, file("narthex: {explainService: shop/web}\n"))
    assert told.own.explain_service == ""
    assert "narthex: is not a known field" in told.warnings[0]


@pytest.mark.row("27.12", "27.22")
def test_periods_are_those_of_the_mode():
    sections = {
        "iptables": {"syncPeriod": "10s"},
        "nftables": {"syncPeriod": "20s"},
        "ipvs": {"syncPeriod": "40s", "minSyncPeriod": "3s"},
    }
    assert of({"mode": "iptables", **sections}).periods.sync == 10.0
    assert of({"mode": "nftables", **sections}).periods.sync == 20.0
    assert of({"mode": "userspace", **sections}).periods.sync == 10.0
    ipvs = of({"mode": "ipvs", **sections}).periods
    assert (ipvs.minimum, ipvs.sync) == (3.0, 40.0)


FOUR, SIX = (IPFamily.IPV4,), (IPFamily.IPV6,)


@pytest.mark.row("26.6")
@pytest.mark.parametrize(
    ("flags", "families", "said"),
    [
        ({"clusterCIDR": "10.0.0.0/8,fd00::/8"}, FAMILIES, []),
        ({"clusterCIDR": "10.0.0.0/8"}, FOUR, []),
        (
            {"clusterCIDR": "10.0.0.0/8"},
            FAMILIES,
            ["clusterCIDR names no network of IPv6: no source counts as a pod there"],
        ),
        (
            {"clusterCIDR": "fd00::/8"},
            FOUR,
            ["clusterCIDR names no network of IPv4", "clusterCIDR names a network of IPv6, which this node does not"],
        ),
        ({"clusterCIDR": "10.0.0.0/8", "detectLocalMode": "NodeCIDR"}, FAMILIES, []),
        (
            {"nodePortAddresses": ["10.0.0.0/8"]},
            FAMILIES,
            ["nodePortAddresses names no network of IPv6: node ports answer on every address there"],
        ),
        (
            {"nodePortAddresses": ["10.0.0.0/8"], "narthex": {"strictNodePortAddresses": True}},
            FAMILIES,
            ["nodePortAddresses names no network of IPv6: no node port answers there"],
        ),
        ({"nodePortAddresses": ["10.0.0.0/8", "primary"]}, FAMILIES, []),
        ({"nodePortAddresses": ["all", "localhost"], "mode": "iptables"}, FAMILIES, []),
        ({"nodePortAddresses": ["primary", "localhost"]}, FAMILIES, ["nodePortAddresses names localhost"]),
        ({"nodePortAddresses": ["primary"]}, FAMILIES, []),
        ({"mode": "iptables"}, FAMILIES, ["nodePortAddresses is not set: node ports answer on every address"]),
        (
            {"healthzBindAddress": "10.0.0.1"},
            SIX,
            ["healthzBindAddress 10.0.0.1 is of a family that this node does not serve"],
        ),
        ({"healthzBindAddress": ""}, SIX, []),
        ({"bindAddress": "fd20::11"}, SIX, []),
    ],
)
def test_what_does_not_fit_the_families_is_said(flags, families, said):
    found = family_warnings(of(flags), families)
    assert len(found) == len(said), found
    assert all(warning.startswith(start) for warning, start in zip(found, said, strict=True)), found


def test_a_wrong_flag_names_the_field():
    with pytest.raises(SettingsError, match=r"^command line: clusterCIDR .*10\.0\.0"):
        of({"clusterCIDR": "10.0.0"})


def test_a_wrong_file_names_line_and_field(file):
    with pytest.raises(SettingsError, match=r"config\.yaml:3: .*mode"):
        of({}, file("mode: chains\n"))


def test_a_missing_file_says_so(tmp_path):
    with pytest.raises(SettingsError, match=r"nothing\.yaml.*No such file"):
        of({}, tmp_path / "nothing.yaml")


def test_a_host_name_that_no_node_can_have():
    with pytest.raises(SettingsError, match="hostnameOverride"):
        of({}, host="my_machine!")
    assert of({"hostnameOverride": "fine"}, host="my_machine!").node.node_name == "fine"


def test_unusual_fields_are_warned_of(file):
    assert any("nonsense" in warning for warning in of({}, file("nonsense: 1\n")).warnings)


def test_pods_that_cannot_be_told_are_warned_of():
    assert any("clusterCIDR" in warning for warning in of().warnings)
    assert of({"clusterCIDR": "10.0.0.0/8"}).warnings == ()
    assert of({"detectLocalMode": "NodeCIDR"}).warnings == ()


def test_the_configuration_in_force_is_shown_in_kube_proxys_words(file):
    shown = of({"clusterCIDR": "10.64.0.0/12,fd64::/48"}, file("iptables: {syncPeriod: 90s}\n")).configuration
    assert shown["kind"] == "KubeProxyConfiguration"
    assert shown["clusterCIDR"] == "10.64.0.0/12,fd64::/48"
    assert shown["iptables"]["syncPeriod"] == "1m30s"
    assert shown["iptables"]["localhostNodePorts"] is True
    assert shown["ipvs"]["strictARP"] is False
    assert list(shown["ipvs"]["excludeCIDRs"]) == []
    assert shown["detectLocal"] == {"bridgeInterface": "", "interfaceNamePrefix": ""}
    assert shown["healthzBindAddress"] == "0.0.0.0:10256"
    assert shown["conntrack"]["tcpCloseWaitTimeout"] == "1h0m0s"


def test_what_is_shown_can_be_read_again(file, tmp_path):
    import json

    told = of({"clusterCIDR": "10.64.0.0/12"}, file("mode: iptables\n"))
    again = tmp_path / "again.yaml"
    again.write_text(json.dumps(told.configuration, default=list))
    assert of(path=again).node == told.node


def test_a_file_and_flags_that_name_other_fields_of_one_section_of_ours(file):
    own = "---\napiVersion: narthex/v1alpha1\nkind: NarthexConfiguration\nparts: {proxy: false}\nannouncer: {port: 7000}\n"
    flags = {"narthex": {"parts": {"announcer": True, "proxy": True}, "announcer": {"keyFile": "/etc/key"}}}
    told = of(flags, file(own))
    assert told.own.parts.announcer and not told.own.parts.proxy
    assert (told.own.announcer.port, told.own.announcer.key_file) == (7000, "/etc/key")
    assert [warning for warning in told.warnings if "proxy" in warning]
