"""Names in a lab: pods ask as pods do, with the resolvers that they have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from narthex.lab.program import labs
from narthex.testing.load import until

pytestmark = pytest.mark.kernel

SOURCE = Path(labs.__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}
NAME = f"nxt-{os.getpid()}-dns"
MANIFESTS = """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: redis}
spec:
  replicas: 2
  selector: {matchLabels: {app: redis}}
  template:
    metadata: {labels: {app: redis}}
    spec: {containers: [{name: c, ports: [{name: client, containerPort: 6379}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: redis}
spec:
  ipFamilyPolicy: PreferDualStack
  selector: {app: redis}
  ports: [{name: client, port: 6379}]
---
apiVersion: v1
kind: Service
metadata: {name: peers}
spec:
  clusterIP: None
  selector: {app: redis}
  ports: [{name: client, port: 6379}]
---
apiVersion: v1
kind: Service
metadata: {name: cache}
spec: {type: ExternalName, externalName: redis.default.svc.cluster.local}
---
apiVersion: v1
kind: Service
metadata: {name: away}
spec: {type: ExternalName, externalName: db.example.org}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: shop}
spec: {ports: [{port: 80}]}
"""
COREFILE = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: coredns, namespace: kube-system}
data:
  Corefile: |
    cluster.local in-addr.arpa ip6.arpa {
        kubernetes cluster.local in-addr.arpa ip6.arpa
    }
    acme.local {
        hosts {
            192.0.2.7 abc.acme.local
        }
    }
"""
MUSL = """
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
int main(int argc, char **argv) {
    struct addrinfo hints, *found, *each;
    char text[64];
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    int error = getaddrinfo(argv[1], 0, &hints, &found);
    if (error) return puts(gai_strerror(error)), 1;
    for (each = found; each; each = each->ai_next)
        puts(inet_ntop(each->ai_family, each->ai_family == AF_INET
            ? (void *)&((struct sockaddr_in *)each->ai_addr)->sin_addr
            : (void *)&((struct sockaddr_in6 *)each->ai_addr)->sin6_addr, text, sizeof text));
    return 0;
}
"""


def narthex(*words, check=True):
    argv = [sys.executable, "-m", "narthex", *words]
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done.stdout


class Lab:
    def __init__(self, directory):
        self.directory = directory
        state = json.loads(narthex("lab", "status", "--name", NAME, "-o", "json"))["state"]
        self.pods = [f"{pod['namespace']}/{pod['name']}" for pod in state["pods"]]
        self.addresses = sorted(address for pod in state["pods"] for address in pod["addresses"])
        (redis,) = [each for each in state["services"] if each["name"] == "redis"]
        self.service = sorted(each["address"] for each in redis["frontends"])
        self.resolver = next(each for each in state["services"] if each["name"] == "kube-dns")

    def inside(self, *argv, pod=0, check=True):
        return narthex("lab", "exec", "--name", NAME, self.pods[pod], "--", *argv, check=check)

    def addresses_of(self, *argv):
        return sorted(
            {line.split()[0] for line in self.inside(*argv, check=False).splitlines() if "." in line or ":" in line}
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    directory = tmp_path_factory.mktemp("names")
    (directory / "all.yaml").write_text(MANIFESTS)
    try:
        narthex("lab", "up", str(directory), "--nodes", "2", "--name", NAME)
        yield Lab(directory)
    finally:
        narthex("lab", "down", "--name", NAME)


@pytest.fixture(scope="module")
def musl(tmp_path_factory):
    """A program with musl's resolver, as images of Alpine have it."""
    directory = tmp_path_factory.mktemp("musl")
    (directory / "ask.c").write_text(MUSL)
    libraries = Path("/usr/lib/x86_64-linux-musl")
    if not libraries.is_dir():
        libraries = next(Path("/usr/lib").glob("*-linux-musl"))
    (own,) = Path("/usr/lib").glob("*/tcc/libtcc1.a")
    start = [str(libraries / name) for name in ("crt1.o", "crti.o", "libc.a")]
    argv = [
        "tcc",
        "-nostdlib",
        "-nostdinc",
        f"-I/usr/include/{libraries.name}",
        f"-I{own.parent / 'include'}",
        "-static",
    ]
    argv += ["-o", str(directory / "ask"), str(directory / "ask.c"), *start, str(own), str(libraries / "crtn.o")]
    subprocess.run(argv, check=True)
    return str(directory / "ask")


def test_a_pod_has_the_resolv_conf_of_a_kubelet(lab):
    text = lab.inside("cat", "/etc/resolv.conf")
    assert text.splitlines() == [
        "search default.svc.cluster.local svc.cluster.local cluster.local",
        "nameserver 10.96.0.10",
        "options ndots:5",
    ]
    assert "cluster.local" not in Path("/etc/resolv.conf").read_text()
    assert lab.resolver["endpoints"] == 2


@pytest.mark.row("S22")
@pytest.mark.parametrize("name", ["redis", "redis.default", "redis.default.svc.cluster.local", "cache"])
def test_glibc_musl_and_dig_find_a_service(lab, musl, name):
    assert len(lab.service) == 2
    assert lab.addresses_of("getent", "ahosts", name) == lab.service
    assert lab.addresses_of(musl, name) == lab.service
    dug = [line for kind in ("A", "AAAA") for line in lab.inside("dig", "+search", "+short", name, kind).splitlines()]
    assert sorted(line for line in dug if not line.endswith(".")) == lab.service


def test_a_headless_service_is_its_pods(lab, musl):
    four = [address for address in lab.addresses if "." in address]
    assert lab.addresses_of("getent", "ahostsv4", "peers") == four
    assert lab.addresses_of(musl, "peers") == four
    assert lab.inside("dig", "+search", "+short", "_client._tcp.peers", "SRV").count(" 6379 ") == 2


def test_other_namespaces_and_what_is_not_there(lab, musl):
    assert lab.addresses_of("getent", "ahosts", "web.shop") != []
    for asked in (["getent", "ahosts", "web"], [musl, "web"], [musl, "no.such.name"]):
        assert lab.addresses_of(*asked) == []
    assert "status: NXDOMAIN" in lab.inside("dig", "example.org")
    assert "db.example.org." in lab.inside("dig", "+search", "away")


def test_a_request_by_name_and_the_way_it_goes(lab):
    said = lab.inside("curl", "-s", "http://redis:6379/")
    assert "redis-" in said
    told = narthex("trace", lab.pods[0], "redis.default:6379", "--lab", NAME)
    assert "redis.default.svc.cluster.local.: " in told and "plan and rules agree" in told


def test_the_cluster_dns_follows_its_config_map(lab):
    assert lab.inside("dig", "+short", "abc.acme.local").split() == []
    (lab.directory / "dns.yaml").write_text(COREFILE)
    for pod in range(2):
        until(lambda: lab.inside("dig", "+short", "abc.acme.local", pod=pod).split() == ["192.0.2.7"], "the new zone")  # noqa: B023
        assert lab.addresses_of("getent", "ahosts", "redis") == lab.service


def test_a_node_that_does_not_answer_itself_asks_another(lab):
    """The addresses go with the process; then the Service leads to the nodes, of which one answers."""
    state = json.loads(narthex("lab", "status", "--name", NAME, "-o", "json"))["state"]
    here = next(pod["node"] for pod in state["pods"] if f"{pod['namespace']}/{pod['name']}" == lab.pods[0])
    (process,) = [each["process"]["pid"] for each in state["processes"] if each["node"] == here]
    os.kill(process, 9)
    until(lambda: "10.96.0.10" not in narthex("lab", "exec", "--name", NAME, here, "--", "ip", "address"), "the end")
    # Every other question goes to the node's own server, which is gone, and is refused.
    asked = ["dig", "+short", "+tries=1", "+time=2", "redis.default.svc.cluster.local"]
    four = next(address for address in lab.service if "." in address)
    until(lambda: four in lab.inside(*asked, check=False).split(), "an answer of the other node")
