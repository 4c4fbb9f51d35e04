"""Manifests, node and configuration to what can be planned."""

from pathlib import Path

import pytest

from narthex.model.net import IPFamily
from narthex.model.objects import Node
from narthex.testing.build import node, service, snapshot
from narthex.trace.program.inputs import ClusterObjects, InputError, NodeOptions, node_inputs, read_cluster

SERVICE = """
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {clusterIP: 10.110.0.5, ports: [{port: 80}]}
"""


def test_good_objects_count_beside_bad_ones(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(SERVICE)
    (tmp_path / "bad.yaml").write_text(SERVICE.replace("port: 80", "port: 70000").replace("web", "bad"))
    cluster = read_cluster(tmp_path)
    assert [str(key) for key in cluster.snapshot.services] == ["shop/web"]
    assert "shop/bad" in str(cluster.problems[0])


def test_nothing_usable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no Service"):
        read_cluster(tmp_path)
    (tmp_path / "bad.yaml").write_text(SERVICE.replace("port: 80", "port: 0"))
    with pytest.raises(InputError, match="shop/web"):
        read_cluster(tmp_path)
    with pytest.raises(InputError):
        read_cluster(tmp_path / "gone")


def test_the_only_node_is_meant_when_none_is_named() -> None:
    assert node_inputs(ClusterObjects(snapshot=snapshot(node())), NodeOptions()).config.node_name == "worker-a"
    with pytest.raises(InputError, match="worker-a, worker-b"):
        node_inputs(ClusterObjects(snapshot=snapshot(node(), Node(name="worker-b"))), NodeOptions())
    with pytest.raises(InputError, match="hold no Node"):
        node_inputs(ClusterObjects(snapshot=snapshot(with_node=False)), NodeOptions())


def test_addresses_of_the_node() -> None:
    plain = ClusterObjects(snapshot=snapshot(service("shop/web", "10.110.0.5"), with_node=False))
    unknown = node_inputs(plain, NodeOptions(node="worker-z"))
    assert "no address of node worker-z" in unknown.problems[0]
    told = node_inputs(plain, NodeOptions(node="worker-z", node_ips=("10.20.0.99", "fd20::99")))
    assert told.host.addresses == ("10.20.0.99", "fd20::99")
    assert told.problems == ()
    assert told.plan(IPFamily.IPV4).node_ports.cidrs == ("10.20.0.99/32",)
    with pytest.raises(InputError, match="nonsense"):
        node_inputs(plain, NodeOptions(node="worker-z", node_ips=("nonsense",)))


def test_families_in_use() -> None:
    four = snapshot(service("shop/web", "10.110.0.5"), with_node=False)
    assert node_inputs(ClusterObjects(snapshot=four), NodeOptions(node="a")).families == (IPFamily.IPV4,)
    six = snapshot(service("shop/web", "fd6e::5"), with_node=False)
    assert node_inputs(ClusterObjects(snapshot=six), NodeOptions(node="a")).families == (IPFamily.IPV6,)
    assert node_inputs(ClusterObjects(snapshot=snapshot(node())), NodeOptions()).families == (
        IPFamily.IPV4,
        IPFamily.IPV6,
    )


def test_configuration(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
        "mode: iptables\nclusterCIDR: 10.64.0.0/12\nhostnameOverride: worker-a\n"
    )
    cluster = ClusterObjects(snapshot=snapshot(node(), Node(name="worker-b")))
    inputs = node_inputs(cluster, NodeOptions(config_file=config))
    assert (inputs.mode, inputs.config.node_name) == ("iptables", "worker-a")
    assert inputs.plan(IPFamily.IPV4).pods.cidrs == ("10.64.0.0/12",)
    chosen = node_inputs(
        cluster, NodeOptions(config_file=config, mode="nftables", cluster_cidr="10.0.0.0/8", node="worker-b")
    )
    assert (chosen.mode, chosen.config.node_name) == ("nftables", "worker-b")
    assert chosen.plan(IPFamily.IPV4).pods.cidrs == ("10.0.0.0/8",)
    config.write_text("kind: Something")
    with pytest.raises(InputError):
        node_inputs(cluster, NodeOptions(config_file=config))
    with pytest.raises(InputError):
        node_inputs(cluster, NodeOptions(cluster_cidr="10.0.0.0"))
