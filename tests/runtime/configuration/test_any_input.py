"""Written configurations read as the same, and any other text is refused in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.proxy.program.settings import node_config
from narthex.runtime.configuration.file import ConfigurationError, ProxyConfiguration, file_text, parse
from narthex.runtime.configuration.values import (
    ClientConnection,
    ConntrackConfiguration,
    IpvsConfiguration,
    LoggingConfiguration,
    ModeConfiguration,
    OwnConfiguration,
    WinkernelConfiguration,
)

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
