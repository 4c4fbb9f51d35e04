"""`narthex trace --lab`: the live rules and routes of a running lab."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import narthex
from narthex.linux.namespaces import in_namespace

pytestmark = pytest.mark.kernel

HELLO = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: hello}
spec:
  replicas: 2
  selector: {matchLabels: {app: hello}}
  template:
    metadata: {labels: {app: hello}}
    spec: {containers: [{name: hello, image: none, ports: [{containerPort: 8080}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: hello}
spec: {type: NodePort, selector: {app: hello}, ports: [{port: 4000, targetPort: 8080, nodePort: 30001}]}
"""


def narthex_says(*words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(Path(narthex.__file__).parents[1])}
    command = [sys.executable, "-m", "narthex", *words]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.fixture(params=["nftables", "iptables", "userspace"])
def lab(request, tmp_path: Path):
    (tmp_path / "hello.yaml").write_text(HELLO)
    name = f"nxt-{os.getpid()}"
    narthex_says("lab", "up", str(tmp_path), "--name", name, "--nodes", "2", "--mode", request.param)
    try:
        yield name
    finally:
        narthex_says("lab", "down", "--name", name)


def test_live_rules_and_routes_are_told(lab: str) -> None:
    data = json.loads(narthex_says("trace", "outside", "node-1:30001", "--lab", lab, "-o", "json"))
    assert (data["plan"]["node"], data["service"], data["plan"]["rules"]) == (
        "node-1",
        "default/hello",
        "read from the node",
    )
    assert data["plan"]["agree"] is True
    # The order is that of the slots, which endpoints get as they become ready.
    here, there = sorted(data["ends"], key=lambda end: " by way of " in end["route"])
    assert here["route"] == "over cni0, straight to it"
    assert there["route"] == "over eth0 by way of 192.168.49.12 (node node-2)"
    assert here["name"].startswith("pod default/hello-")
    assert here["name"].endswith(" on node-1")

    pod = here["name"].split()[1]
    told = narthex_says("trace", pod, "hello", "--lab", lab)
    assert f"pod {pod} on node-1" in told
    assert "sender     pod; " in told
    assert "; plan and rules agree)" in " ".join(told.split())
    the_kernel_does_what_the_path_says(lab, data)


REQUESTS = 40
"""So many that each of two endpoints is met: it is not with a chance of one in 10^12."""


def the_kernel_does_what_the_path_says(lab: str, data) -> None:
    """Each endpoint with its share, and who it believes to be asked by."""
    assert data["missing"] == []
    assert {each["probability"] for each in data["ends"]} == {"1/2"}
    if data["plan"]["mode"] == "userspace":
        *_, delivery, relay = data["way"]["steps"]
        assert (delivery["stage"], relay["stage"]) == ("delivery", "relay")
        assert delivery["before"]["destination"] == "192.168.49.11"  # the relay, a process of the node
        return
    predicted = {each["name"].split("/")[1].split()[0]: each["source"] for each in data["ends"]}
    seen: dict[str, str] = {}
    for _ in range(REQUESTS):
        with in_namespace(f"nx-{lab}-outside"):
            client = socket.create_connection(("192.168.49.11", 30001), timeout=30)
        with client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            said = client.makefile("rb").read().decode()
        words = said.rpartition("\r\n")[2].split()
        seen[words[0]] = words[-1].rpartition(":")[0]
    assert seen == predicted
