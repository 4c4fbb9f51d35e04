"""Load balancers in a lab: a client outside reaches their addresses, which move when a node dies."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.lab import topology
from narthex.lab.program import labs
from narthex.lab.program.state import StateDirectory
from narthex.linux.namespaces import namespace_names
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

ROOT = Path(labs.__file__).parents[4]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
NAME = f"nxt-{os.getpid()}-lb"
NODES = ("node-1", "node-2", "node-3")
LOCAL, LOCAL_SIX, ASKED, LATE = "192.168.15.1", "fd00:15::11", "192.168.15.8", "172.6.6.6"
MORE = """\
apiVersion: v1
kind: Service
metadata: {name: six, namespace: kube-system, annotations: {metallb.io/loadBalancerIPs: "fd00:15::11"}}
spec:
  type: LoadBalancer
  externalTrafficPolicy: Local
  ipFamilies: [IPv6]
  selector: {app: traefik}
  ports: [{port: 80, targetPort: web}]
---
apiVersion: v1
kind: Service
metadata: {name: filer, namespace: kube-system}
spec:
  type: LoadBalancer
  loadBalancerIP: 192.168.15.8
  selector: {app: traefik}
  ports: [{port: 80, targetPort: web}]
"""
LATE_POOLS = """\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: late, namespace: metallb-system}
spec: {addresses: [172.6.6.6/32], autoAssign: false}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: bad, namespace: metallb-system}
spec: {addresses: [10.244.0.0/20]}
---
apiVersion: v1
kind: Service
metadata: {name: late, namespace: kube-system, annotations: {metallb.io/address-pool: late}}
spec:
  type: LoadBalancer
  selector: {app: traefik}
  ports: [{port: 80, targetPort: web}]
"""


def narthex(*words, status=0):
    argv = [sys.executable, "-m", "narthex", *words]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def curl(address):
    """What a client outside is told at an address; empty without an answer."""
    place = f"[{address}]" if ":" in address else address
    argv = ["ip", "netns", "exec", topology.outside_namespace(NAME)]
    argv += ["curl", "-s", "--connect-timeout", "2", "--max-time", "5", f"http://{place}/"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    directory = tmp_path_factory.mktemp("balancers")
    for each in (ROOT / "examples" / "traefik").glob("*.yaml"):
        shutil.copy(each, directory)
    (directory / "more.yaml").write_text(MORE)
    pools = ("--pool", "192.168.15.0/28", "--pool", "fd00:15::10-fd00:15::1f")
    try:
        told = narthex("lab", "up", str(directory), "--name", NAME, "--nodes", "3", *pools, "-o", "json")
        yield directory, json.loads(told)
    finally:
        labs.down(NAME)


def test_outside_reaches_the_addresses_that_were_asked_for(lab):
    _, state = lab
    given = {
        (each["name"], frontend["address"])
        for each in state["services"]
        for frontend in each["frontends"]
        if frontend["kind"] == "load balancer IP"
    }
    assert given == {("traefik-load-balance-service", LOCAL), ("six", LOCAL_SIX), ("filer", ASKED)}
    # Local: the pod sees the client itself, and it is on the node that answers. `lab up` waits until somebody does.
    for address, client in ((LOCAL, "192.0.2.2:"), (LOCAL_SIX, "[fd00:192:0:2::2]:")):
        assert f"asked by {client}" in curl(address)
    # Cluster: whichever node answers, all pods get some.
    found = {curl(ASKED).split(" on ")[1].split(",")[0] for _ in range(40)}
    assert found == {"node-1", "node-2"}


@pytest.mark.usefixtures("lab")
def test_no_node_has_an_address_and_the_key_is_for_root_alone():
    for node in NODES:
        argv = ["ip", "-netns", f"nx-{NAME}-{node}", "-json", "address"]
        links = json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
        own = {entry["local"] for link in links for entry in link["addr_info"]}
        assert own.isdisjoint({LOCAL, LOCAL_SIX, ASKED})
    key = StateDirectory(NAME).announcer_key
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert key.read_text() not in StateDirectory(NAME).node("node-1").configuration.read_text()


def test_a_pool_that_comes_later_is_used_and_a_bad_one_takes_nothing_away(lab):
    directory, _ = lab
    (directory / "late.yaml").write_text(LATE_POOLS)
    told = narthex("lab", "wait", "--name", NAME)
    assert "IPAddressPool metallb-system/bad: is refused: 10.244.0.0/20 overlaps" in told
    assert curl(LATE) and curl(LOCAL)
    (directory / "late.yaml").unlink()
    assert narthex("lab", "wait", "--name", NAME) == "Everything is in force.\n"
    assert not curl(LATE) and curl(LOCAL)


@pytest.mark.usefixtures("lab")
def test_a_killed_node_is_replaced():
    def told(*words):
        return json.loads(narthex(*words, "--lab", NAME, "-o", "json"))

    before = told("trace", "outside", f"{LOCAL}:80")
    holder = before["announced"][0].partition(" ")[0]
    other = {"node-1": "node-2", "node-2": "node-1"}[holder]
    assert before["announced"][0] == f"{holder} answers for {LOCAL}"
    assert f" on {holder}, " in curl(LOCAL)

    state = json.loads(narthex("lab", "kill", holder, "--name", NAME, "-o", "json"))
    assert state["killed"] == [holder]
    for address in (LOCAL, LOCAL_SIX):
        until(lambda address=address: f" on {other}, " in curl(address), f"{address} at {other}")
    after = told("trace", "outside", f"{LOCAL}:80")
    assert after["announced"][0] == f"{other} answers for {LOCAL}"
    says = told("lb", "why", "kube-system/traefik-load-balance-service")
    reasons = {each["node"]: each["reason"] for each in says["addresses"][0]["nodes"]}
    assert reasons == {holder: "NodeLost", other: "Announces", "node-3": "NoLocalEndpoint"}

    # By now, or soon, the cluster knows, too, and sends nobody there any more.
    narthex("lab", "wait", "--name", NAME)
    assert {curl(ASKED).split(" on ")[1].split(",")[0] for _ in range(10)} == {other}
    shown = narthex("lab", "status", "--name", NAME, status=1)
    assert "DEAD, killed" in shown and "NOT READY" in shown
    assert (
        "already dead"
        in subprocess.run(
            [sys.executable, "-m", "narthex", "lab", "kill", holder, "--name", NAME],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        ).stderr
    )


def test_a_lab_without_pools_says_so_when_one_comes(tmp_path):
    name = f"{NAME}0"
    (tmp_path / "all.yaml").write_text(MORE)
    try:
        state = json.loads(narthex("lab", "up", str(tmp_path), "--name", name, "--nodes", "1", "-o", "json"))
        assert not state["balancing"] and not StateDirectory(name).announcer_key.exists()
        assert '"announcer": false' in StateDirectory(name).node("node-1").configuration.read_text()
        (tmp_path / "late.yaml").write_text(LATE_POOLS)
        assert "IPAddressPool metallb-system/late: was added while the nodes run without announcers" in narthex(
            "lab", "wait", "--name", name
        )
    finally:
        labs.down(name)
    assert not [each for each in namespace_names() if topology.owns(name, each)]
    assert not StateDirectory(name).path.exists()
