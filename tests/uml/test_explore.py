import pytest
from narthex.host.run import run
from netns.container import Container
from netns.test_deploy import deployed, addressed, Deployed
import shutil
from pathlib import Path
pytestmark=[pytest.mark.kernel]

@pytest.mark.parametrize("besides", [(), ("NET_RAW",), ("NET_RAW","DAC_OVERRIDE")])
@pytest.mark.parametrize("folder", [False, True])
def test_x(tmp_path, besides, folder):
    with deployed(tmp_path, "ipvs") as cluster:
        cluster.prepare()
        run(["touch", "/run/xtables.lock"])
        print("DEF", run(["readlink","-f","/usr/sbin/iptables"]))
        c = Container("narthex", tmp_path, cluster.config, folders=[cluster.manifests])
        cluster.log_path = c.log_path
        cluster.process = c.start(cluster.world.node, "--manifests", str(cluster.manifests), besides=besides, lock=folder)
        try:
            cluster.ready()
            print("ANS", {addressed(w) for w in cluster.ways()})
        finally:
            print(cluster.log)
            print(besides, folder)
        assert 0
