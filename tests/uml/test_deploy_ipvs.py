"""Mode ipvs in the DaemonSet's container, with the patch that it needs."""

import pytest
from tests.deploy.kernel.test_deploy import addressed, assert_nothing_refused, deployed
from tests.lab.kernel.container import pod, terminate, with_patch
from tests.proxy.kernel.small_cluster import CLUSTER_IP

from narthex.linux.run import run

pytestmark = pytest.mark.kernel


def test_with_the_patch_mode_ipvs_needs_no_more(tmp_path):
    with deployed(tmp_path, "ipvs") as cluster:
        cluster.prepare()
        cluster.start(spec=pod(with_patch(tmp_path / "deploy"))).ready()
        assert {addressed(way) for way in cluster.ways() for _ in range(8)} == {*cluster.ends}
        assert CLUSTER_IP[4] in run(["ipvsadm", "-S", "-n"], namespace=cluster.world.node)
        assert terminate(cluster.process) == 0
        cluster.process = None
        assert_nothing_refused(cluster.log)
