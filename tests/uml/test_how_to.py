"""The how-to of mode ipvs as written, on the second kernel, which has IP_VS."""

import pytest
from tests import howtos
from tests.lab.kernel.lab_cluster import running
from tests.proxy.kernel.small_cluster import CLUSTER_IP, SmallCluster, service, slices

from narthex.lab import topology
from narthex.linux.run import run
from narthex.model.net import Protocol
from narthex.netfilter.ipvs import parse_ipvsadm

pytestmark = pytest.mark.kernel
PAGE = "run-ipvs"
SETTINGS = howtos.HowTo(
    # Nodes of a lab share the machine's host name.
    words={"--proxy-mode": "--hostname-override node-1 --proxy-mode"},
    before={"narthex proxy": "cp $KUBECONFIG /var/lib/kube-proxy/kubeconfig"},
)


def test_each_command(tmp_path):
    """Nothing serves Services on the node until the page starts the proxy."""
    manifests, proxy = tmp_path / "manifests", tmp_path / "proxy"
    manifests.mkdir()
    (manifests / "shop.yaml").write_text(howtos.MANIFESTS)
    howtos.write_stand_in(proxy, tmp_path / "gone")
    options = ("--nodes", "2", "--mode", "ipvs", "--kube-proxy", str(proxy))
    with running("how-to", *options, directory=manifests) as cluster:
        (tmp_path / "gone").touch()
        node = topology.nodes(cluster.name, 2)[0].namespace
        assert not parse_ipvsadm(run(["ipvsadm", "-S", "-n"], namespace=node)).servers
        howtos.PageRun(cluster, PAGE, tmp_path / "page", SETTINGS).run()
        address = cluster.get("service", "web", "-n", "shop")["spec"]["clusterIP"]
        pod = cluster.get("pod", "web-1", "-n", "shop")["status"]["podIP"]
        servers = parse_ipvsadm(run(["ipvsadm", "-S", "-n"], namespace=node)).servers
        assert [each.address for each in servers[address, Protocol.TCP, 80].reals] == [pod]
        # What the text mentions besides.
        assert run(["modprobe", "-n", "ip_vs"]) == ""
        run(["ipvsadm", "-Lnc"], namespace=node)


def test_the_configuration(tmp_path):
    (text,) = howtos.yaml_blocks(howtos.ROOT / "docs" / "howto" / f"{PAGE}.md")
    file = tmp_path / "config.yaml"
    file.write_text(f"{text}\nclusterCIDR: 10.64.0.0/12,fd64::/48\nhostnameOverride: worker-a\n")
    with SmallCluster(tmp_path, "ipvs") as cluster:
        cluster.put("web", service(), *slices({}))
        cluster.start("--config", str(file)).ready()
        servers = parse_ipvsadm(run(["ipvsadm", "-S", "-n"], namespace=cluster.world.node)).servers
        assert {each.scheduler for each in servers.values()} == {"lc"}
        assert (CLUSTER_IP[4], Protocol.TCP, 80) in servers
