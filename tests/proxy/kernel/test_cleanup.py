"""Clean-up and changes of mode: what Narthex or kube-proxy left goes, what is others' stays to the byte."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, slices
from tests.proxy.kernel.small_cluster import service as service_object

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.nfnetlink import NfNetlink
from narthex.linux.run import run
from narthex.model.net import FAMILIES, IPFamily
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.kernel.cleanup import Cleanup
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.proxy.kernel.nftables import NftablesTarget
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.testing.load import Load

pytestmark = pytest.mark.kernel

SOURCE = Path(__file__).parents[3] / "src"
LOCALNET = "net.ipv4.conf.all.route_localnet"

# A rule in each built-in chain: iptables makes those that a rule needs and never takes them away.
FOREIGN = """*nat
:DOCKER - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:FLANNEL-POSTRTG - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "flanneld \\"masq\\" -j KUBE-SERVICES" -j FLANNEL-POSTRTG
-A DOCKER -p tcp -m tcp --dport 8080 -j REDIRECT --to-ports 80
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:KUBE-ROUTER-INPUT - [0:0]
:FLANNEL-FWD - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A INPUT -j KUBE-ROUTER-INPUT
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A OUTPUT -p udp -m udp --dport 53 -j ACCEPT
COMMIT
*mangle
:CNI-MARK - [0:0]
-A PREROUTING -j CNI-MARK
COMMIT
"""
FOREIGN_NFT = """
table inet firewalld {
  set kube-proxy { type ipv4_addr; elements = { 192.0.2.1 }; }
  chain filter_INPUT { type filter hook input priority filter + 10; policy accept; tcp dport 443 accept; }
}
table ip kube-network-policies {
  chain KUBE-SERVICES { counter; }
}
"""
OLD = """*nat
:KUBE-PORTALS-CONTAINER - [0:0]
:KUBE-XLB-ABCDEFGHIJKLMNOP - [0:0]
:KUBE-MARK-DROP - [0:0]
-A PREROUTING -m comment --comment "handle ClusterIPs; NOTE: this must be before the NodePort rules" -j KUBE-PORTALS-CONTAINER
-A KUBE-PORTALS-CONTAINER -p tcp -m tcp --dport 81 -j REDIRECT --to-ports 4000
-A KUBE-XLB-ABCDEFGHIJKLMNOP -j KUBE-MARK-DROP
COMMIT
"""
IPVS = """*filter
:KUBE-NODE-PORT - [0:0]
-A INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-NODE-PORT
-A KUBE-NODE-PORT -m set --match-set SET dst -j ACCEPT
COMMIT
"""
KUBE_PROXY = """
table FAMILY kube-proxy {
  chain services { }
  chain nat-prerouting { type nat hook prerouting priority -100; jump services; }
}
"""


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-clean"
    create_namespace(name)
    yield name
    delete_namespace(name)


def commands(variant):
    return [f"{tool}-{variant}" for tool in ("iptables", "ip6tables")]


def load(namespace, text, *variants):
    for variant in variants or ("nft", "legacy"):
        for command in commands(variant):
            run([f"{command}-restore", "--noflush"], stdin=text, namespace=namespace)


def dump(namespace):
    """Everything in the namespace, in every tool's own words, without figures and dates."""
    texts = [run(["nft", "-s", "list", "ruleset"], namespace=namespace), run(["ipset", "save"], namespace=namespace)]
    texts += [
        run([f"{command}-save"], namespace=namespace) for variant in ("nft", "legacy") for command in commands(variant)
    ]
    lines = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return [line.partition(" [")[0] for line in lines]


def narthex(namespace, *argv):
    """The program, in the namespace."""
    with in_namespace(namespace):
        return subprocess.run(
            [sys.executable, "-m", "narthex", *argv],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )


def cluster(family):
    four = family is IPFamily.IPV4
    return plan(
        service("shop/web", "10.110.0.1" if four else "fd6e::1", type="NodePort", node_port=30080),
        endpoint_slice("shop/web", endpoint("10.64.1.5" if four else "fd64:0:0:1::5")),
        family=family,
        localhost_node_ports=True,
        node_port_addresses=None,
    )


def install_everything(namespace):
    """Rules of all modes and ages at once, both families."""
    for family in FAMILIES:
        for backend, target in (
            (NftablesBackend(), NftablesTarget(family, namespace)),
            (IptablesBackend(), IptablesTarget(family, namespace)),
            (IptablesBackend(), IptablesTarget(family, namespace, legacy=True)),
        ):
            target.apply(backend.diff(None, backend.render(cluster(family))))
        run(["nft", "-f", "-"], stdin=KUBE_PROXY.replace("FAMILY", family.nft), namespace=namespace)
    load(namespace, OLD)
    for name, family, command in (
        ("KUBE-NODE-PORT-TCP", "inet", "iptables-nft"),
        ("KUBE-6-NODE-PORT-TCP", "inet6", "ip6tables-legacy"),
    ):
        run(["ipset", "create", name, "hash:ip,port", "family", family], namespace=namespace)
        text = IPVS.replace("SET dst", f"{name} dst,dst")
        run([f"{command}-restore", "--noflush"], stdin=text, namespace=namespace)


@pytest.mark.row("26.3")
def test_everything_goes_and_the_rest_stays_to_the_byte(namespace):
    """Rows 26.3, 22.9; 24.3, 24.4, 25.2 for what older ones left."""
    load(namespace, FOREIGN)
    run(["nft", "-f", "-"], stdin=FOREIGN_NFT, namespace=namespace)
    run(["ipset", "create", "KUBE-SRC-MINE", "hash:ip"], namespace=namespace)
    before = dump(namespace)
    install_everything(namespace)
    assert len(dump(namespace)) > len(before) + 100
    assert run(["sysctl", "-n", LOCALNET], namespace=namespace).strip() == "1"

    done = narthex(namespace, "cleanup", "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert dump(namespace) == before
    said = json.loads(done.stdout)
    assert said["left"] == []
    removed = {(one["kind"], one["family"]): one for one in said["removed"]}
    for label, nft in (("IPv4", "ip"), ("IPv6", "ip6")):
        assert removed["nftables table", label]["names"] == [f"{nft} {name}" for name in ("narthex", "kube-proxy")]
        for variant in ("nft", "legacy"):
            chains = removed[f"iptables-{variant} chain", label]
            names = chains["names"]
            assert chains["count"] == len(names) > 10
            assert {"nat KUBE-SERVICES", "nat KUBE-XLB-ABCDEFGHIJKLMNOP", "mangle KUBE-PROXY-CANARY"} <= set(names)
            assert (f"iptables-{variant} jump", label) in removed
    assert removed["ipset", "IPv4"]["names"] == ["KUBE-NODE-PORT-TCP"]
    assert removed["ipset", "IPv6"]["names"] == ["KUBE-6-NODE-PORT-TCP"]
    # The guard of the setting has gone, so the setting has too.
    assert run(["sysctl", "-n", LOCALNET], namespace=namespace).strip() == "0"

    again = narthex(namespace, "cleanup")
    assert (again.returncode, again.stdout) == (0, "There are no rules of Narthex or kube-proxy.\n")
    assert dump(namespace) == before


def test_what_others_use_stays_and_is_told(namespace):
    install_everything(namespace)
    user = "*nat\n:CNI-SETMARK - [0:0]\n-A CNI-SETMARK -j KUBE-MARK-MASQ\nCOMMIT\n"
    run(["iptables-restore", "--noflush"], stdin=user, namespace=namespace)
    done = narthex(namespace, "cleanup")
    assert done.returncode == 1
    assert "removed 2 nftables tables (IPv4): ip narthex, ip kube-proxy" in done.stdout
    assert done.stderr.splitlines() == [
        "left iptables-nft chain nat KUBE-MARK-MASQ (IPv4): a rule of chain CNI-SETMARK uses it, "
        "which is not kube-proxy's: -j KUBE-MARK-MASQ"
    ]
    kept = [line for line in dump(namespace) if "KUBE-" in line]
    assert set(kept) >= {"-A CNI-SETMARK -j KUBE-MARK-MASQ", ":KUBE-MARK-MASQ -"}
    assert not [line for line in kept if "KUBE-SERVICES" in line]


def test_a_tool_that_fails_is_told_and_the_rest_goes(namespace):
    install_everything(namespace)
    run(["nft", "add chain ip nat holder; add rule ip nat holder jump KUBE-MARK-MASQ"], namespace=namespace)
    done = narthex(namespace, "cleanup")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "KUBE-MARK-MASQ" in done.stderr
    rest = dump(namespace)
    assert not [line for line in rest if "table ip narthex" in line or "kube-proxy" in line]
    assert not [line for line in rest if "KUBE-SERVICES" in line]


@pytest.mark.row("22.9")
def test_kubelets_share_stays(namespace):
    kubelet = (
        "*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n"
        "*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A OUTPUT -j KUBE-FIREWALL\n"
        "-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "
        '"block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP\nCOMMIT\n'
    )
    run(["iptables-restore"], stdin=kubelet, namespace=namespace)
    before = dump(namespace)
    target, backend = IptablesTarget(IPFamily.IPV4, namespace), IptablesBackend()
    target.apply(backend.diff(None, backend.render(cluster(IPFamily.IPV4))))
    assert narthex(namespace, "cleanup").returncode == 0
    after = dump(namespace)
    assert [line for line in after if "KUBE-" in line] == [line for line in before if "KUBE-" in line]
    assert run(["sysctl", "-n", LOCALNET], namespace=namespace).strip() == "1", "kubelet's guard is still there"


@pytest.mark.parametrize("kubelet", [True, False])
def test_a_guard_beside_rules_of_others_is_removed_or_reported(namespace, kubelet):
    """The chain KUBE-FIREWALL of older kubelets drops marked packets; ours then shares it."""
    mangle = "*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n" if kubelet else ""
    theirs = (
        "*filter\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\n-A OUTPUT -j KUBE-FIREWALL\n"
        "-A KUBE-FIREWALL -m mark --mark 0x8000/0x8000 -j DROP\nCOMMIT\n"
    )
    run(["iptables-restore"], stdin=mangle + theirs, namespace=namespace)
    before = dump(namespace)
    target, backend = IptablesTarget(IPFamily.IPV4, namespace), IptablesBackend()
    target.apply(backend.diff(None, backend.render(cluster(IPFamily.IPV4))))
    done = narthex(namespace, "cleanup")
    assert done.returncode == 1
    assert "KUBE-FIREWALL" in done.stderr and "guard of 127.0.0.0/8" in done.stderr
    left = [line for line in dump(namespace) if "KUBE-" in line and line not in before]
    assert [line for line in left if "block incoming localnet" not in line] == []
    assert len(left) == kubelet
    assert run(["sysctl", "-n", LOCALNET], namespace=namespace).strip() == str(int(kubelet))


def test_looking_where_nothing_is_starts_no_program(namespace, monkeypatch):
    """A proxy's start must not wait for it."""
    run(["iptables-restore"], stdin=FOREIGN, namespace=namespace)
    generation, started = NfNetlink(namespace).generation(), []
    monkeypatch.setattr("narthex.proxy.kernel.cleanup.run", lambda argv, **_: started.append(argv))
    looks = [(mode, family) for mode in ("nftables", "iptables") for family in FAMILIES]
    begin = time.perf_counter()
    outcomes = [Cleanup(namespace, keep=mode).clean(family) for mode, family in looks]
    looking = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in looks:
        run(["iptables-save"], namespace=namespace)
    programs = time.perf_counter() - begin
    print(f"looking for leftovers where there are none: {looking / programs:.2f} of starting one program each time")
    assert not any(outcome.removed or outcome.left for outcome in outcomes)
    assert started == []
    assert NfNetlink(namespace).generation() == generation
    assert looking < 10 * programs


# ---- changes of mode -----------------------------------------------------------------------------------------------

ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]


@pytest.fixture
def world(tmp_path):
    with SmallCluster(tmp_path, "nftables") as made:
        made.serve(*ENDPOINTS)
        made.put("web", service_object(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
        yield made


def as_legacy(node):
    """Move what iptables-nft holds to iptables-legacy: a node whose kube-proxy came with the old tools."""
    for plain in ("iptables", "ip6tables"):
        text = "".join(run([f"{plain}-nft-save", "-t", table], namespace=node) for table in ("nat", "filter", "mangle"))
        run([f"{plain}-legacy-restore"], stdin=text, namespace=node)
    run(["nft", "flush ruleset"], namespace=node)


def left_of(node):
    """Which modes have rules in the node."""
    modes = {"nftables": "table ip narthex", "kube-proxy": "table ip kube-proxy"}
    ruleset = run(["nft", "list", "ruleset"], namespace=node)
    found = {mode for mode, text in modes.items() if text in ruleset}
    for variant in ("nft", "legacy"):
        for command in commands(variant):
            if ":KUBE-SVC" in run([f"{command}-save"], namespace=node):
                found.add(variant)
    return found


@pytest.mark.parametrize(
    ("former", "mode"),
    [("iptables", "nftables"), ("legacy", "nftables"), ("nftables", "iptables"), ("legacy", "iptables")],
)
@pytest.mark.row("26.1", "26.2", "29.15")
def test_a_change_of_mode_under_load(world, former, mode):
    """No connection fails while old and new rules stand side by side, and in the end only the new ones are there."""
    world.mode = "nftables" if former == "nftables" else "iptables"
    world.start().ready()
    world.kill()
    if former == "legacy":
        as_legacy(world.world.node)
    for name in ("ip", "ip6"):
        run(["nft", "-f", "-"], stdin=KUBE_PROXY.replace("FAMILY", name), namespace=world.world.node)
    assert left_of(world.world.node) == {{"iptables": "nft"}.get(former, former), "kube-proxy"}

    load = Load([world.from_pod(4), world.from_outside(4), world.from_pod(6), world.from_outside(6)])
    try:
        load.hold(40)
        world.mode = mode
        with load.streaming():
            world.start().ready()
            world.wait(
                lambda: left_of(world.world.node) == {{"iptables": "nft"}.get(mode, mode)}, "the end of the old rules"
            )
            made = load.made
            world.wait(lambda: load.made > made + 40, "new connections with the new rules")
        load.exchange()
        assert load.failures == []
        assert load.resent == 0
    finally:
        load.close()
    assert "removed what another mode or kube-proxy had left" in world.log
    assert "another program changed" not in world.log


def test_old_and_new_rules_side_by_side(world):
    """The moment in between, held still: rules of three modes at once, each in force, and every way works."""
    node = world.world.node
    world.mode = "iptables"
    world.start().ready()
    world.kill()
    saved = {
        plain: "".join(run([f"{plain}-save", "-t", table], namespace=node) for table in ("nat", "filter", "mangle"))
        for plain in ("iptables", "ip6tables")
    }
    world.mode = "nftables"
    world.start().ready()
    world.wait(lambda: left_of(node) == {"nftables"}, "the end of the old rules")
    world.kill()
    for plain, text in saved.items():
        for variant in ("nft", "legacy"):
            run([f"{plain}-{variant}-restore"], stdin=text, namespace=node)
    assert left_of(node) == {"nftables", "nft", "legacy"}
    load = Load([world.from_pod(4), world.from_outside(4), world.from_pod(6), world.from_outside(6)])
    try:
        load.hold(40)
        with load.streaming():
            world.wait(lambda: load.made > 100, "new connections")
        load.exchange()
        assert (load.failures, load.resent) == ([], 0)
        assert len(load.endpoints) == len(ENDPOINTS)
    finally:
        load.close()


def test_a_proxy_that_still_runs_is_told_of(world):
    world.start().ready()
    done = narthex(world.world.node, "cleanup")
    assert done.returncode == 1
    assert "they came back: stop the node proxy that runs here first" in done.stderr
    world.kill()
    assert narthex(world.world.node, "cleanup").returncode == 0
    assert left_of(world.world.node) == set()
