"""A proxy whose log is on a full disk."""

from pathlib import Path

import pytest
from tests.proxy.kernel.small_cluster import HERE, SmallCluster, service, slices

pytestmark = pytest.mark.kernel


class SilentCluster(SmallCluster):
    """A cluster whose proxy writes its log to a device that is always full."""

    log = ""


def test_a_proxy_that_cannot_write_its_log_goes_on(tmp_path):
    with SilentCluster(tmp_path, "nftables") as cluster:
        cluster.log_path = Path("/dev/full")
        cluster.put("web", service(), *slices({HERE[4][0]: "ready"}))
        cluster.start()
        cluster.synced(HERE[4][0])
        cluster.put("web", service(), *slices({HERE[4][1]: "ready"}))
        cluster.synced(HERE[4][1])
        assert cluster.get(10256, "/healthz")[0] == 200
