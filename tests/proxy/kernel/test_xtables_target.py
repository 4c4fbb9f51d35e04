"""The iptables Target on a real kernel: what is read back is what was meant, and nobody else's rules change."""

import os
import re
from pathlib import Path

import pytest

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.linux.run import run
from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServicePort
from narthex.netfilter.ast import Jump, Rule, TouchedPart
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.iptables.backend import IptablesBackend
from narthex.proxy.backends.iptables.rules import XtablesChanges
from narthex.proxy.kernel.iptables import IptablesTarget
from narthex.testing.build import endpoint, endpoint_slice, plan, service

pytestmark = pytest.mark.kernel

BACKEND = IptablesBackend()
BOTH = [pytest.param(False, id="default"), pytest.param(True, id="legacy")]

FOREIGN = """*nat
:DOCKER - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 10.64.0.0/12 ! -d 224.0.0.0/4 -m comment --comment "flanneld \\"masq\\"" -j MASQUERADE --random-fully
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 8080 -j DNAT --to-destination 172.17.0.2:80
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:KUBE-ROUTER-INPUT - [0:0]
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A INPUT -j KUBE-ROUTER-INPUT
-A FORWARD -s 10.64.0.0/12 -j ACCEPT
-A OUTPUT -p udp -m multiport --dports 53,123 -m limit --limit 5/sec -j LOG --log-prefix "-j KUBE-SERVICES"
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
COMMIT
"""


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-xt"
    create_namespace(name)
    yield name
    delete_namespace(name)


def cluster(*, backends=3, family=IPFamily.IPV4, **config):
    """Services of every kind: Local policy, ranges, affinity, none, UDP and SCTP."""
    four = family is IPFamily.IPV4
    vip = (lambda n: f"10.110.0.{n}") if four else (lambda n: f"fd6e::{n}")
    pod = (lambda n: f"10.64.{n % 2 + 1}.{n + 10}") if four else (lambda n: f"fd64:0:0:{n % 2 + 1}::{n + 10}")
    outside = (lambda n: f"203.0.113.{n}") if four else (lambda n: f"2001:db8:1b::{n}")
    ports = tuple(
        ServicePort(name=protocol.lower, protocol=protocol, port=53) for protocol in (Protocol.UDP, Protocol.SCTP)
    )
    pods = [endpoint(pod(n), node="worker-a" if n % 2 == 0 else "worker-b") for n in range(backends)]
    objects = (
        service("shop/plain", vip(1), node_port=30080, type="NodePort"),
        endpoint_slice("shop/plain", *pods),
        service(
            "shop/local",
            vip(2),
            node_port=30081,
            type="LoadBalancer",
            balancers=(outside(1),),
            external_policy_local=True,
            source_ranges=("198.51.100.0/24", "2001:db8:c::/64"),
            affinity_seconds=600,
        ),
        endpoint_slice("shop/local", *pods),
        service("shop/void", vip(3), node_port=30082, type="NodePort", external_ips=(outside(2),)),
        service("shop/away", vip(4), internal_policy_local=True),
        endpoint_slice("shop/away", endpoint(pod(1), node="worker-b")),
        service("shop/datagrams", vip(5), ports=ports),
        endpoint_slice(
            "shop/datagrams",
            *pods,
            ports=tuple(EndpointPort(name=p.name, protocol=p.protocol, port=5353) for p in ports),
        ),
    )
    config.setdefault("localhost_node_ports", True)
    config.setdefault("node_port_addresses", None)
    return plan(*objects, family=family, **config)


def saved(namespace, family=IPFamily.IPV4, legacy=False, tables=("nat", "filter", "mangle")):
    """What iptables-save prints, without figures and dates."""
    command = ("iptables" if family is IPFamily.IPV4 else "ip6tables") + ("-legacy" if legacy else "") + "-save"
    text = "".join(run([command, "-t", table], namespace=namespace) for table in tables)
    return [re.sub(r"\[\d+:\d+\]", "[0:0]", line) for line in text.splitlines() if not line.startswith("#")]


def load(namespace, text, legacy=False):
    run(["iptables-legacy-restore" if legacy else "iptables-restore", "--noflush"], stdin=text, namespace=namespace)


@pytest.mark.parametrize("legacy", BOTH)
@pytest.mark.parametrize("family", IPFamily)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"masquerade_all": True, "localhost_node_ports": False},
        {"detect_local_mode": "BridgeInterface", "bridge_interface": "cni0", "masquerade_bit": 31},
        {
            "detect_local_mode": "InterfaceNamePrefix",
            "interface_name_prefix": "veth",
            "node_port_addresses": ("primary",),
        },
        {"detect_local_mode": ""},
    ],
    ids=["cidr", "all", "bridge", "prefix", "nobody"],
)
def test_what_is_read_back_is_what_was_meant(namespace, family, config, legacy):
    target = IptablesTarget(family, namespace, legacy)
    assert target.read() is None
    want = BACKEND.render(cluster(family=family, **config))
    target.apply(BACKEND.diff(None, want))
    assert target.read() == want
    assert not BACKEND.diff(target.read(), want)
    target.clean()
    assert target.read() is None


def test_two_pod_networks_read_back_too(namespace):
    """A planner uses one network of a family; NodeCIDR of a node with two has more."""
    import msgspec

    from narthex.proxy.plan.ir import PodDetector

    two = msgspec.structs.replace(cluster(), pods=PodDetector(cidrs=("10.64.1.0/24", "10.64.9.0/24")))
    target, want = IptablesTarget(IPFamily.IPV4, namespace), BACKEND.render(two)
    target.apply(BACKEND.diff(None, want))
    assert target.read() == want


@pytest.mark.row("21.6", "21.10")
@pytest.mark.parametrize("legacy", BOTH)
def test_a_change_writes_only_what_it_must(namespace, legacy):
    target = IptablesTarget(IPFamily.IPV4, namespace, legacy)
    first = BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, first))
    second, changes = BACKEND.advance(first, cluster(backends=4))
    target.apply(changes)
    assert target.read() == second
    # And back: chains of endpoints that are gone are removed.
    _, changes = BACKEND.advance(second, cluster())
    target.apply(changes)
    assert target.read() == first


@pytest.mark.row("21.9")
@pytest.mark.parametrize("legacy", BOTH)
def test_foreign_rules_stay_byte_for_byte(namespace, legacy):
    load(namespace, FOREIGN, legacy)
    before = saved(namespace, legacy=legacy)
    target = IptablesTarget(IPFamily.IPV4, namespace, legacy)
    rules = BACKEND.render(cluster(localhost_node_ports=False))
    target.apply(BACKEND.diff(None, rules))
    after = saved(namespace, legacy=legacy)
    assert [line for line in after if line in before] == before
    assert target.read() == rules
    target.apply(BACKEND.advance(rules, cluster(backends=1, localhost_node_ports=False))[1])
    assert [line for line in saved(namespace, legacy=legacy) if line in before] == before
    target.clean()
    assert saved(namespace, legacy=legacy) == before


@pytest.mark.row("21.9")
def test_jumps_come_first_and_come_back(namespace):
    load(namespace, FOREIGN)
    target, rules = IptablesTarget(IPFamily.IPV4, namespace), BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, rules))
    assert next(line for line in saved(namespace) if line.startswith("-A PREROUTING")).endswith("-j KUBE-SERVICES")
    run(["iptables", "-t", "nat", "-F", "PREROUTING"], namespace=namespace)
    run(["iptables", "-t", "filter", "-X", "KUBE-PROXY-CANARY"], namespace=namespace)
    changes = BACKEND.diff(target.read(), rules)
    assert changes.jumps and changes.rules == 0
    target.apply(changes)
    assert target.read() == rules


@pytest.mark.parametrize(("meanwhile", "readings"), [([], 1), (["-t", "nat", "-D", "OUTPUT", "1"], 2)])
def test_a_repair_reads_the_kernel_once_unless_others_write_meanwhile(namespace, monkeypatch, meanwhile, readings):
    load(namespace, FOREIGN)
    target, rules = IptablesTarget(IPFamily.IPV4, namespace), BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, rules))
    run(["iptables", "-t", "nat", "-D", "PREROUTING", "1"], namespace=namespace)
    run(["iptables", "-t", "nat", "-F", "KUBE-SERVICES"], namespace=namespace)
    started = []
    monkeypatch.setattr(
        "narthex.proxy.kernel.iptables.run", lambda argv, **options: started.append(argv) or run(argv, **options)
    )
    changes = BACKEND.diff(target.read(), rules)
    if meanwhile:
        run(["iptables", *meanwhile], namespace=namespace)
    target.apply(changes)
    assert started == [["iptables-save"]] * readings
    # What is known of one reading serves one write only.
    assert target.read() == rules
    target.apply(BACKEND.diff(None, rules))
    assert len(started) == readings + 2
    assert target.read() == rules
    target.clean()
    assert target.read() is None


OLD_KUBE_PROXY = """*nat
:KUBE-MARK-DROP - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-XLB-VZFKBL2WWL2EQZ6G - [0:0]
:KUBE-SVC-VZFKBL2WWL2EQZ6G - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -d 192.168.15.1/32 -p tcp -m tcp --dport 80 -j KUBE-XLB-VZFKBL2WWL2EQZ6G
-A KUBE-XLB-VZFKBL2WWL2EQZ6G -s 10.64.0.0/12 -j KUBE-SVC-VZFKBL2WWL2EQZ6G
-A KUBE-XLB-VZFKBL2WWL2EQZ6G -j KUBE-MARK-DROP
COMMIT
*filter
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A FORWARD -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
COMMIT
"""


@pytest.mark.parametrize("legacy", BOTH)
def test_an_older_kube_proxys_rules_are_taken_over(namespace, legacy):
    load(namespace, OLD_KUBE_PROXY, legacy)
    target, rules = IptablesTarget(IPFamily.IPV4, namespace, legacy), BACKEND.render(cluster())
    target.apply(BACKEND.diff(target.read(), rules))
    assert target.read() == rules
    target.clean()
    left = saved(namespace, legacy=legacy)
    assert "-A KUBE-MARK-DROP -j MARK --set-xmark 0x8000/0x8000" in left, "kubelet's chain is not ours"
    assert [line for line in left if "KUBE-" in line and "KUBE-MARK-DROP" not in line] == []


@pytest.mark.parametrize("legacy", BOTH)
def test_a_kubelet_keeps_its_firewall_chain(namespace, legacy):
    kubelet = """*mangle
:KUBE-KUBELET-CANARY - [0:0]
COMMIT
*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -m comment --comment "kubernetes firewall for dropping marked packets" -m mark --mark 0x8000/0x8000 -j DROP
COMMIT
"""
    load(namespace, kubelet, legacy)
    before = saved(namespace, legacy=legacy)
    target, rules = IptablesTarget(IPFamily.IPV4, namespace, legacy), BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, rules))
    after = saved(namespace, legacy=legacy)
    assert [line for line in after if line in before] == before
    assert [line for line in after if "block incoming localnet" in line], "the guard joins kubelet's own rule"
    assert sum(line.endswith("-j KUBE-FIREWALL") for line in after) == 2
    assert target.read() == rules
    without = BACKEND.render(cluster(localhost_node_ports=False))
    target.apply(BACKEND.diff(rules, without))
    assert target.read() == without
    target.clean()
    assert [line for line in saved(namespace, legacy=legacy) if "block incoming" not in line] == before


def test_a_chain_that_others_use_stays(namespace):
    target, rules = IptablesTarget(IPFamily.IPV4, namespace), BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, rules))
    run(
        ["iptables", "-t", "nat", "-A", "POSTROUTING", "-s", "10.9.9.9/32", "-j", "KUBE-MARK-MASQ"], namespace=namespace
    )
    target.clean()
    left = [line for line in saved(namespace) if "KUBE-" in line]
    assert left == [
        ":KUBE-MARK-MASQ - [0:0]",
        "-A POSTROUTING -s 10.9.9.9/32 -j KUBE-MARK-MASQ",
        "-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000",
    ]


def test_localhost_node_ports_switch_on_route_localnet(namespace):
    target = IptablesTarget(IPFamily.IPV4, namespace)
    read = ["cat", "/proc/sys/net/ipv4/conf/all/route_localnet"]
    target.apply(BACKEND.diff(None, BACKEND.render(cluster(localhost_node_ports=False))))
    assert run(read, namespace=namespace).strip() == "0"
    target.apply(BACKEND.diff(None, BACKEND.render(cluster())))
    assert run(read, namespace=namespace).strip() == "1"


def test_a_setting_that_cannot_be_made_stops_no_rules(namespace, monkeypatch, tmp_path, caplog):
    """As in a container with a read-only /proc/sys. It is logged once, tried again, and no difference to repair."""
    setting = tmp_path / "net/ipv4/conf/all/route_localnet"
    setting.parent.mkdir(parents=True)
    setting.write_text("0\n")
    setting.chmod(0o444)
    write = Path.write_text

    def refuse(path, *arguments, **options):
        if path == setting:
            raise OSError(30, "Read-only file system", str(path))
        return write(path, *arguments, **options)

    monkeypatch.setattr("narthex.proxy.kernel.iptables.PROC_SYS", tmp_path)
    target, rules = IptablesTarget(IPFamily.IPV4, namespace), BACKEND.render(cluster())
    with caplog.at_level("INFO", "narthex"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", refuse)
            target.apply(BACKEND.diff(None, rules))
            for _ in range(3):
                assert target.read() == rules
                assert not BACKEND.diff(target.read(), rules)
        (record,) = caplog.records
        assert "127.0.0.1" in record.message and "localhostNodePorts" in record.message
        assert target.read() == rules
        assert setting.read_text() == "1"
        assert "refused before" in caplog.records[1].message
    assert any("KUBE-SVC" in line for line in saved(namespace))


@pytest.mark.row("21.10")
@pytest.mark.parametrize("legacy", BOTH)
def test_a_refusal_names_the_line_and_changes_nothing(namespace, legacy):
    target, rules = IptablesTarget(IPFamily.IPV4, namespace, legacy), BACKEND.render(cluster())
    target.apply(BACKEND.diff(None, rules))
    bad = XtablesChanges(
        family=IPFamily.IPV4, written={"nat": {"KUBE-NODEPORTS": (Rule((Jump("KUBE-SVC-NOWHERE"),)),)}}
    )
    with pytest.raises(ApplyError, match="KUBE-SVC-NOWHERE"):
        target.apply(bad)
    assert target.read() == rules


def test_a_missing_namespace_is_an_error_that_names_it():
    with pytest.raises((ApplyError, FileNotFoundError), match="nxt-none"):
        IptablesTarget(IPFamily.IPV4, "nxt-none").read()


@pytest.mark.parametrize(
    ("words", "chains"),
    [
        (["-t", "nat", "-F", "KUBE-SERVICES"], ["KUBE-SERVICES"]),
        (["-t", "nat", "-I", "KUBE-NODEPORTS", "-j", "ACCEPT"], ["KUBE-NODEPORTS"]),
        (["-t", "nat", "-D", "KUBE-POSTROUTING", "1"], ["KUBE-POSTROUTING"]),
    ],
)
def test_a_touched_chain_is_written_again_without_a_reading(namespace, monkeypatch, words, chains):
    target = IptablesTarget(IPFamily.IPV4, namespace)
    want, changes = BACKEND.advance(None, cluster())
    target.apply(changes)
    before = saved(namespace)
    run(["iptables", *words], namespace=namespace)
    assert saved(namespace) != before
    with monkeypatch.context() as patched:
        patched.setattr(target, "_found", lambda: pytest.fail("the rules were read"))
        damage = target.damage(want, {TouchedPart("nat", chain) for chain in chains})
        assert damage is not None and damage.transactions == 1
        target.apply(damage)
    assert sorted(saved(namespace)) == sorted(before)


@pytest.mark.parametrize(
    ("commands", "chain", "lacks"),
    [
        (["-F KUBE-SERVICES"], "KUBE-SERVICES", True),
        (["-D KUBE-POSTROUTING 1"], "KUBE-POSTROUTING", True),
        (["-F KUBE-SERVICES", "-F KUBE-NODEPORTS", "-X KUBE-NODEPORTS"], "KUBE-NODEPORTS", True),
        (["-I KUBE-NODEPORTS -j ACCEPT"], "KUBE-NODEPORTS", False),
        (["-R KUBE-POSTROUTING 1 -j ACCEPT"], "KUBE-POSTROUTING", False),
        (["-F PREROUTING"], "PREROUTING", False),
        ([], "KUBE-FOREIGN", False),
    ],
)
def test_a_chain_that_lacks_rules_is_found_without_a_reading(namespace, monkeypatch, commands, chain, lacks):
    target = IptablesTarget(IPFamily.IPV4, namespace)
    want, changes = BACKEND.advance(None, cluster())
    target.apply(changes)
    for words in commands:
        run(["iptables", "-t", "nat", *words.split()], namespace=namespace)
    monkeypatch.setattr(target, "_run", lambda _: pytest.fail("the rules were read"))
    part = TouchedPart("nat", chain)
    assert target.lacking(want, {part, TouchedPart("raw", "OUTPUT")}) == ({part} if lacks else set())


@pytest.mark.parametrize(
    "touched",
    [
        None,
        set(),
        {TouchedPart("nat", "PREROUTING")},
        {TouchedPart("nat", "KUBE-SERVICES"), TouchedPart("nat", "KUBE-FOREIGN")},
        {TouchedPart("filter", "KUBE-FIREWALL")},
        {TouchedPart("raw", "KUBE-SERVICES")},
    ],
)
def test_other_touched_parts_need_a_reading(namespace, touched):
    want, _ = BACKEND.advance(None, cluster())
    assert IptablesTarget(IPFamily.IPV4, namespace).damage(want, touched) is None
