"""Somebody else changes rules: it is noticed as it happens, mended at once, counted; our own writes are not mistaken."""

import os
import re
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.proxy.kernel.small_cluster import HERE, THERE, SmallCluster, service, slices

from narthex.linux.monitor import MOST_TOUCHED, LegacyTableSizes, NftablesMonitor, RulePoller, RuleScope
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.nfnetlink import NfNetlink
from narthex.linux.run import run
from narthex.model.net import FAMILIES, IPFamily
from narthex.netfilter.ast import TouchedPart
from narthex.testing.load import OpenConnection, until

pytestmark = [pytest.mark.kernel, pytest.mark.row("21.8", "21.17", "29.9")]

AT_ONCE = 10.0
"""Seconds, as a limit: a change that nobody noticed is only mended by the next full sync, 30 s later."""
ENDPOINTS = [HERE[4][0], THERE[4][0], HERE[6][0], THERE[6][0]]
FOREIGN = "*nat\n-A POSTROUTING -s 192.0.2.0/24 -j RETURN\nCOMMIT\n*filter\n-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT\nCOMMIT\n"


@contextmanager
def running(directory, mode, path=None):
    """A cluster whose proxy has synced; `path` stands first on its PATH."""
    before = os.environ["PATH"]
    try:
        if path is not None:
            os.environ["PATH"] = f"{path}:{before}"
        with SmallCluster(directory, mode) as made:
            made.serve(*ENDPOINTS)
            made.put("web", service(), *slices(dict.fromkeys(ENDPOINTS, "ready")))
            made.start().ready()
            yield made
    finally:
        os.environ["PATH"] = before


@pytest.fixture
def nftables(tmp_path):
    with running(tmp_path, "nftables") as made:
        yield made


@pytest.fixture
def iptables(tmp_path):
    with running(tmp_path, "iptables") as made:
        yield made


def counted(cluster, name):
    """A counter of the proxy, both families together."""
    text = cluster.get(10249, "/metrics")[1]
    return sum(float(value) for value in re.findall(rf"^{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE))


def read_backs(cluster):
    """How often the rules were read."""
    return len(re.findall(r"synced IPv[46] in [^(]*\([^)]*\bread ", cluster.log))


def works(cluster):
    """New connections in both families reach an endpoint."""
    for way in (cluster.from_pod(4), cluster.from_outside(4), cluster.from_pod(6), cluster.from_outside(6)):
        line = OpenConnection(way)
        line.exchange()
        line.close()


def damage(cluster, *argv, stdin=""):
    """Run a command in the node; wait until the rules are as before, and say how long that took."""
    before, healed = ours(cluster), counted(cluster, "narthex_drift_healed")
    foreign = counted(cluster, "narthex_foreign_changes")
    run(argv, stdin=stdin, namespace=cluster.world.node)
    begin = time.monotonic()

    def is_mended():
        # A repair that fails since the other program is still at work is followed by a sync of everything, which counts as none.
        return counted(cluster, "narthex_drift_healed") > healed or ours(cluster) == before

    cluster.wait(is_mended, f"mending after {' '.join(argv)}")
    seconds = time.monotonic() - begin
    print(f"{cluster.mode}: {' '.join(argv)}: mended {seconds * 1000:.0f} ms after the command ended")
    cluster.wait(lambda: ours(cluster) == before, "the rules as they were")
    works(cluster)
    assert counted(cluster, "narthex_foreign_changes") > foreign
    return seconds


def ours(cluster):
    """Rules of ours, whatever the order of the tables."""
    lines = [line.strip() for line in cluster.rules().splitlines()]
    return sorted(line for line in lines if cluster.mode == "nftables" or "KUBE-" in line)


def test_nftables_damage_of_all_kinds_is_mended(nftables):
    node = nftables.world.node
    before = counted(nftables, "narthex_drift_healed")
    listed = run(["nft", "list", "map", "ip", "narthex", "services"], namespace=node)
    key = re.search(r"(10\.110\.0\.1 \. tcp \. 80)", listed)[1]
    damages = [
        ("nft", "flush", "ruleset"),
        ("nft", "delete", "table", "ip", "narthex"),
        ("nft", "delete", "table", "ip6", "narthex"),
        ("nft", "flush", "chain", "ip", "narthex", "services"),
        ("nft", "delete", "element", "ip", "narthex", "services", f"{{ {key} }}"),
        ("nft", "flush", "map", "ip6", "narthex", "endpoints"),
        ("nft", "insert", "rule", "ip", "narthex", "services", "return"),
        ("nft", "flush", "ruleset"),
    ]
    seconds = [damage(nftables, *argv) for argv in damages]
    assert sorted(seconds)[len(seconds) // 2] < AT_ONCE
    # A flush of everything is one for each family.
    assert len(damages) <= counted(nftables, "narthex_drift_healed") - before <= len(damages) + 2
    assert "another program changed our IPv4 rules" in nftables.log


def test_iptables_damage_of_all_kinds_is_mended(iptables):
    damages = [
        ("iptables", "-t", "nat", "-F"),
        ("nft", "flush", "ruleset"),
        ("ip6tables", "-F"),
        ("iptables", "-t", "nat", "-F", "KUBE-SERVICES"),
        ("iptables", "-t", "nat", "-D", "PREROUTING", "1"),
        ("iptables", "-t", "mangle", "-X", "KUBE-PROXY-CANARY"),
    ]
    seconds = [damage(iptables, *argv) for argv in damages]
    # A firewall is reloaded: it puts back its own rules and flushes all others (rke2 10469).
    seconds.append(damage(iptables, "iptables-restore", stdin=FOREIGN))
    assert sorted(seconds)[len(seconds) // 2] < AT_ONCE
    assert "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT" in iptables.rules()


def test_iptables_legacy_is_asked_again_and_again(tmp_path):
    """It tells nobody of changes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("iptables", "ip6tables"):
        for tool in ("", "-save", "-restore"):
            (tools / f"{name}{tool}").symlink_to("/usr/sbin/xtables-legacy-multi")
    with running(tmp_path, "iptables", tools) as cluster:
        node = cluster.world.node
        assert ":KUBE-SVC" in run(["iptables-legacy-save"], namespace=node)
        assert ":KUBE-SVC" not in run(["iptables-nft-save"], namespace=node)
        for argv in (
            ("iptables-legacy", "-t", "nat", "-F"),
            ("ip6tables-legacy", "-t", "nat", "-D", "PREROUTING", "1"),
        ):
            damage(cluster, *argv)
        assert counted(cluster, "narthex_drift_healed") == 2


@pytest.mark.parametrize("mode", ["nftables", "iptables"])
def test_our_own_writes_are_not_taken_for_others(tmp_path, mode):
    with running(tmp_path, mode) as cluster:
        reads = read_backs(cluster)
        assert reads == 2
        for number in range(2, 8):
            # Other numbers of endpoints and affinity need other chains, not elements alone.
            chosen = [HERE[4][number % 7], *THERE[4][: number % 3], HERE[6][1]]
            spec = {"sessionAffinity": "ClientIP"} if number % 2 else {}
            cluster.put(
                f"other-{number}",
                service(f"other-{number}", number, 30100 + number, **spec),
                *slices(dict.fromkeys(chosen, "ready"), f"other-{number}"),
            )
            cluster.synced(f"10.110.0.{number}")
        for number in range(2, 8):
            cluster.remove(f"other-{number}")
        cluster.wait(lambda: "10.110.0.7" not in cluster.rules(), "the end of the Services")
        works(cluster)
        assert counted(cluster, "narthex_foreign_changes") == 0
        assert counted(cluster, "narthex_drift_healed") == 0
        assert read_backs(cluster) == reads


@contextmanager
def storm(namespace, text):
    """Somebody runs an nft script again and again, some hundred times a second."""
    ended, made = threading.Event(), []
    with in_namespace(namespace):
        nft = subprocess.Popen(
            ["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True
        )

    def rewrite():
        while not ended.wait(0.005):
            nft.stdin.write(text)
            nft.stdin.flush()
            made.append(time.monotonic())

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()
        nft.stdin.close()
        nft.wait(20)


def processor_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_storm_in_other_tables_costs_nothing(nftables):
    node = nftables.world.node
    reads, generation, spent = read_backs(nftables), NfNetlink(node).generation(), processor_seconds(nftables.process)
    text = "flush chain ip narthexes c; add rule ip narthexes c counter; add rule ip narthexes c accept\n"
    run(["nft", "add table ip narthexes; add chain ip narthexes c"], namespace=node)
    with storm(node, text) as made:
        until(lambda: len(made) >= 300, "the storm")
    grown = NfNetlink(node).generation() - generation
    spent = processor_seconds(nftables.process) - spent
    print(f"{grown} transactions in {made[-1] - made[0]:.1f} s cost the proxy {spent:.2f} s of processor")
    assert grown >= 300
    # On a busy machine, the kernel may have dropped notifications: then the proxy looks once for each family.
    assert read_backs(nftables) <= reads + 2
    assert counted(nftables, "narthex_foreign_changes") == 0
    run(["nft", "delete table ip narthexes"], namespace=node)
    damage(nftables, "nft", "flush", "ruleset")


def test_a_storm_in_chains_of_others_is_passed_over(iptables):
    node = iptables.world.node
    run(["iptables", "-t", "nat", "-N", "DOCKER"], namespace=node)
    # Changes while the proxy writes are counted for all families and tables: let it have written all it wants.
    damage(iptables, "iptables", "-t", "nat", "-F", "KUBE-SERVICES")
    reads, before = read_backs(iptables), counted(iptables, "narthex_foreign_changes")
    with storm(node, "flush chain ip nat DOCKER; add rule ip nat DOCKER counter\n") as made:
        until(lambda: len(made) >= 200, "the storm")
    assert counted(iptables, "narthex_foreign_changes") == before
    assert read_backs(iptables) == reads


def test_a_storm_among_our_own_rules_is_looked_at_seldom(iptables):
    """Many changes to the built-in chains by others share one read-back."""
    node = iptables.world.node
    run(["iptables", "-A", "INPUT", "-p", "tcp", "-m", "tcp", "--dport", "22", "-j", "ACCEPT"], namespace=node)
    reads = read_backs(iptables)
    with storm(node, "add rule ip filter INPUT accept\n") as made:
        until(lambda: len(made) >= 300, "the storm")
    seen, foreign = read_backs(iptables) - reads, counted(iptables, "narthex_foreign_changes")
    print(f"{foreign:.0f} changes in {made[-1] - made[0]:.1f} s were {seen} read-backs")
    assert foreign >= 100
    assert 1 <= seen <= foreign / 5
    assert counted(iptables, "narthex_drift_healed") == 0
    works(iptables)


# ---- the monitor alone -----------------------------------------------------------------------------------------------


@pytest.fixture
def namespace():
    name = f"nxt-{os.getpid()}-mon"
    create_namespace(name)
    yield name
    delete_namespace(name)


def test_more_than_the_queue_holds_is_noticed_too(namespace, monkeypatch):
    monkeypatch.setattr("narthex.linux.monitor._QUEUE", 1 << 16)
    monitor = NftablesMonitor(RuleScope(tables=frozenset(("narthex",))), FAMILIES, namespace)
    elements = ", ".join(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(10_000))
    text = f"table ip other {{\n set s {{ type ipv4_addr; elements = {{ {elements} }}\n }}\n}}\n"
    run(["nft", "-f", "-"], stdin=text, namespace=namespace)
    with monitor.listening(lambda: None):
        until(lambda: bool(monitor.look()), "the notice of what was lost")
    monitor.close()


def test_a_change_while_we_write_is_noticed(namespace):
    monitor, notices = NftablesMonitor(RuleScope(tables=frozenset(("narthex",))), [IPFamily.IPV4], namespace), []
    with monitor.listening(lambda: notices.append(1)):
        with monitor.writing() as own:
            run(["nft", "add table ip narthex"], namespace=namespace)
            own.transactions += 1
        assert not monitor.look() and not notices
        with monitor.writing(), in_namespace(namespace):
            subprocess.run(["nft", "add chain ip narthex c"], check=True)
        assert notices, "nobody wakes the loop"
        assert monitor.look() == {IPFamily.IPV4: 1}
        assert monitor.touched(IPFamily.IPV4) is None
    monitor.close()


def test_the_monitor_names_what_others_touched(namespace):
    monitor = NftablesMonitor(RuleScope(tables=frozenset(("narthex",))), [IPFamily.IPV4], namespace)

    def touched(text):
        run(["nft", text], namespace=namespace)
        until(lambda: bool(monitor.look()), "the notification")
        return monitor.touched(IPFamily.IPV4)

    chains = "; ".join(f"add chain ip narthex c{number}" for number in range(MOST_TOUCHED + 1))
    with monitor.listening(lambda: None):
        assert touched("add table ip narthex") is None
        touched("add chain ip narthex c; add set ip narthex s { type ipv4_addr; }")
        assert touched("add rule ip narthex c accept; add rule ip narthex c drop") == {TouchedPart("narthex", "c")}
        assert touched("add element ip narthex s { 192.0.2.1 }") == {TouchedPart("narthex", set="s")}
        assert touched(chains) is None
        assert touched("flush chain ip narthex c") == {TouchedPart("narthex", "c")}
    monitor.close()


def test_one_change_of_many_rules_is_noticed_once(namespace):
    """The kernel notifies of it in more pieces than the monitor's thread takes at a time."""
    monitor = NftablesMonitor(RuleScope(tables=frozenset(("nat",))), [IPFamily.IPV4], namespace)
    rules = "".join(f"-A KUBE-SERVICES -p tcp -m tcp --dport {number} -j ACCEPT\n" for number in range(1, 4000))
    text = f"*nat\n:KUBE-SERVICES - [0:0]\n{rules}COMMIT\n"
    for argv, stdin in ((["iptables-restore"], text), (["iptables", "-t", "nat", "-F", "KUBE-SERVICES"], "")):
        run(argv, stdin=stdin, namespace=namespace)
        assert monitor._drain()
        assert monitor.look() == {IPFamily.IPV4: 1}
        touched = monitor.touched(IPFamily.IPV4)
        for _ in range(20):
            monitor._drain()
            assert not monitor.look(), "the rest of the change counts as another one"
    assert touched == {TouchedPart("nat", "KUBE-SERVICES")}
    monitor.close()


def test_a_change_that_is_under_way_when_we_begin_to_write_is_noticed(namespace):
    """The kernel counts a transaction before it notifies of it: with thousands of rules, milliseconds before."""
    monitor, netlink = NftablesMonitor(RuleScope(tables=frozenset(("nat",))), FAMILIES, namespace), NfNetlink(namespace)
    chains = "".join(f":KUBE-SVC-{number} - [0:0]\n" for number in range(1000))
    rules = "".join(
        f"-A KUBE-SVC-{number // 4} -p tcp -m tcp --dport {number} -j ACCEPT\n" for number in range(1, 4000)
    )
    seen = []

    def noticed():
        for _ in range(20):
            monitor._drain()
        return bool(monitor.look())

    for _ in range(8):
        run(["iptables-restore"], stdin=f"*nat\n{chains}{rules}COMMIT\n", namespace=namespace)
        assert noticed() and not noticed()
        before = netlink.generation()
        with in_namespace(namespace):
            flush = subprocess.Popen(["iptables", "-t", "nat", "-F"])
        while netlink.generation() == before:
            assert flush.poll() is None or netlink.generation() > before
        with monitor.writing():
            flush.wait(60)
        seen.append(noticed())
    monitor.close()
    netlink.close()
    assert all(seen), f"{seen.count(False)} of {len(seen)} flushes went unnoticed"


def test_writing_waits_for_a_change_that_is_counted_and_not_notified_yet(namespace, monkeypatch):
    """The same with a transaction that the kernel ends when the monitor waits for it, or only while we write."""
    monitor, foreign = NftablesMonitor(RuleScope(tables=frozenset(("narthex",))), FAMILIES, namespace), []
    generation = NfNetlink.generation

    def end():
        if not foreign:
            foreign.append("add table ip narthex")
            run(["nft", *foreign], namespace=namespace)

    monkeypatch.setattr(NfNetlink, "generation", lambda link: generation(link) + (not foreign))
    monkeypatch.setattr(NfNetlink, "wait_for_transaction", lambda _: end())
    with monitor.writing():
        end()
    monitor._drain()
    assert monitor.look() == {IPFamily.IPV4: 1}
    monitor.close()


def test_sizes_of_legacy_tables_tell_of_changes(namespace):
    run(["iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES"], namespace=namespace)
    sizes = LegacyTableSizes(FAMILIES, namespace)
    poll = RulePoller(sizes, FAMILIES)
    assert (poll.look(), poll.look()) == ({}, {})
    run(["iptables-legacy", "-t", "nat", "-X"], namespace=namespace)
    assert poll.look() == dict.fromkeys(FAMILIES, 1)
    with poll.writing():
        run(["iptables-legacy", "-t", "nat", "-N", "KUBE-SERVICES"], namespace=namespace)
    assert poll.look() == {}
    sizes.close()
