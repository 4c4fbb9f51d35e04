"""`narthex trace` over dumps and bundles: the walks that people made by hand, and over more than one node."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program.bundle import write_file

DUMPS = Path(__file__).parents[1] / "dumps"
HELLO = DUMPS / "hello-world.iptables-save"


def trace(*words: object, fails: bool = False) -> str:
    """The output in lines that do not wrap; status 3 says that something is unknown."""
    done = CliRunner(env={"COLUMNS": "1000"}).invoke(main, ["trace", *map(str, words)])
    assert (done.exit_code not in (0, 3)) is fails, done.output
    return done.output


def ends(*words: object) -> dict[str, str]:
    """Where it goes, each with its exact share."""
    data = json.loads(trace(*words, "-o", "json"))
    return {f"{each['address']}:{each['port']}": each["probability"] for each in data["ends"]}


@pytest.mark.parametrize(
    ("routes", "told"),
    [
        ("10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1\n", "10.244.3.81: over cni0, straight to it"),
        ("10.244.3.0/24 via 10.244.3.0 dev flannel.1 onlink\n", "10.244.3.81: over flannel.1 by way of 10.244.3.0"),
    ],
    ids=["node 2", "node 1"],
)
def test_the_walk_of_hello_world_on_both_nodes(tmp_path: Path, routes: str, told: str) -> None:
    """From the node port by chain after chain to the pod, and on by the route of `ip r | grep`."""
    (tmp_path / "routes.txt").write_text(routes)
    said = trace(
        "outside",
        "10.0.0.5:30001",
        "--rules",
        HELLO,
        "--rules",
        tmp_path / "routes.txt",
        "--node-ip",
        "10.0.0.5",
        "--all",
    )
    for chain in ("KUBE-NODEPORTS", "KUBE-SVC-5MRENC7Q6ZQR6GKR", "KUBE-SEP-JNUJINTC6VOLRDUD"):
        assert f"jump {chain}" in said
    assert "dnat to 10.244.3.81:8080" in said
    assert told in said
    assert "Service port  default/hello-world-service" in said


def test_the_rule_its_line_and_what_nearly_matched_are_told() -> None:
    said = trace("10.244.0.5", "10.106.183.112:4000", "--rules", HELLO, "--all")
    assert f" {HELLO}:21\n" in said
    assert "nearly: -A KUBE-SERVICES ! -s 10.244.0.0/16 -d 10.106.183.112/32" in said
    assert ends("10.244.0.5", "10.106.183.112:4000", "--rules", HELLO) == {"10.244.3.81:8080": "1"}


def test_what_is_missing_is_said_and_not_guessed() -> None:
    said = trace("10.244.0.5", "10.106.183.112:4000", "--rules", HELLO)
    assert "the route to 10.244.3.81 is unknown" in said
    assert "; routes; sysctls (--all says why)" in said
    assert "  routes: no file contains it" in trace("10.244.0.5", "10.106.183.112:4000", "--rules", HELLO, "--all")
    assert "assumed to be eth0, name another interface with --iif" in said


def test_a_question_without_sources_or_with_too_many() -> None:
    assert "say where to look" in trace("outside", "10.0.0.1:80", fails=True)
    assert "a lab has its live rules" in trace("outside", "10.0.0.1:80", "--lab", "x", "--live", fails=True)


def node(number: int, **more: str) -> dict[str, str]:
    """The parts of a node of a small cluster with host-gw routes."""
    other = 3 - number
    links = [
        {"ifindex": 1, "ifname": "lo", "flags": ["UP"], "mtu": 65536},
        {"ifindex": 2, "ifname": "eth0", "flags": ["UP"], "mtu": 1500},
        {"ifindex": 3, "ifname": "cni0", "flags": ["UP"], "mtu": 1500, "linkinfo": {"info_kind": "bridge"}},
    ]
    addresses = [
        {"ifname": name, "addr_info": [{"local": ip, "prefixlen": 24, "scope": "global"}]}
        for name, ip in (("eth0", f"10.0.0.{number}"), ("cni0", f"10.244.{number}.1"))
    ]
    routes = [
        {"dst": "default", "gateway": "10.0.0.254", "dev": "eth0"},
        {"dst": "10.0.0.0/24", "dev": "eth0"},
        {"dst": f"10.244.{number}.0/24", "dev": "cni0"},
        {"dst": f"10.244.{other}.0/24", "gateway": f"10.0.0.{other}", "dev": "eth0"},
        {"type": "local", "dst": f"10.0.0.{number}", "dev": "eth0", "table": "local"},
        {"type": "local", "dst": f"10.244.{number}.1", "dev": "cni0", "table": "local"},
    ]
    conf = "".join(
        f"net.ipv4.conf.{name}.{key} = 0\n"
        for name in ("all", "eth0", "cni0")
        for key in ("rp_filter", "accept_local", "route_localnet", "src_valid_mark")
    )
    return {
        "rules/iptables-nft.txt": RULES.format(mark=more.pop("mark", "MASQUERADE")),
        "net/links.json": json.dumps(links),
        "net/addresses.json": json.dumps(addresses),
        "net/routes-4.json": json.dumps(routes),
        "net/routes-6.json": "[]",
        "net/neighbours.json": "[]",
        "net/sysctls.txt": f"net.ipv4.ip_forward = 1\nnet.bridge.bridge-nf-call-iptables = 0\n{conf}",
        **{name.replace("__", "/"): text for name, text in more.items()},
    }


RULES = """\
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SVC - [0:0]
-A PREROUTING -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j KUBE-SVC
-A PREROUTING -d 10.0.0.1/32 -p tcp -m tcp --dport 30080 -j MARK --set-xmark 0x4000/0x4000
-A PREROUTING -d 10.0.0.1/32 -p tcp -m tcp --dport 30080 -j KUBE-SVC
-A KUBE-SVC -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.244.1.7:8080
-A KUBE-SVC -p tcp -j DNAT --to-destination 10.244.2.7:8080
-A POSTROUTING -m mark --mark 0x4000/0x4000 -j {mark}
COMMIT
"""


def bundles(tmp_path: Path, *nodes: dict[str, str]) -> list[str]:
    words: list[str] = []
    for number, parts in enumerate(nodes, 1):
        path = tmp_path / f"node-{number}.tgz"
        write_file(path, BundleManifest(node=f"node-{number}", writer="test"), parts)
        words += ["--bundle", str(path)]
    return words


def test_it_goes_on_at_the_next_node_and_the_answer_comes_back(tmp_path: Path) -> None:
    both = bundles(tmp_path, node(1), node(2))
    said = trace("outside", "10.0.0.1:30080", *both)
    assert "next node    over eth0 to node node-2, which has 10.0.0.2\n" in said
    assert "✓ delivered to the endpoint, which sees 10.0.0.1 (masqueraded)\n" in said
    assert "\n  reply        reaches the sender\n" in said
    assert ends("outside", "10.0.0.1:30080", *both) == {"10.244.1.7:8080": "1/2", "10.244.2.7:8080": "1/2"}


def test_without_the_next_nodes_bundle_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "nodes.yaml").write_text(
        "{apiVersion: v1, kind: Node, metadata: {name: node-2}, spec: {podCIDR: 10.244.2.0/24, podCIDRs: [10.244.2.0/24]}, "
        "status: {addresses: [{type: InternalIP, address: 10.0.0.2}]}}"
    )
    one = bundles(tmp_path, node(1))
    said = trace("outside", "10.0.0.1:30080", *one, "--manifests", tmp_path / "nodes.yaml")
    assert "continues on node node-2: give its bundle" in said


def test_an_answer_that_nobody_rewrites_back_is_lost(tmp_path: Path) -> None:
    """No masquerading for a client beyond the cluster: the other node's pod answers by another way."""
    both = bundles(tmp_path, node(1, mark="RETURN"), node(2))
    said = trace("outside", "10.0.0.1:30080", *both)
    assert "the sender asked 10.0.0.1:30080 and is answered by 10.244.2.7" in said
    assert said.count("reply        reaches the sender") == 1


def test_two_pods_of_one_bridge_need_br_netfilter(tmp_path: Path) -> None:
    said = trace("10.244.1.9", "10.96.0.9:80", *bundles(tmp_path, node(1), node(2)))
    assert "the sender asked 10.96.0.9:80 and is answered by 10.244.1.7" in said
    (tmp_path / "on").mkdir()
    on = {"net__sysctls.txt": node(1)["net/sysctls.txt"].replace("iptables = 0", "iptables = 1")}
    said = trace("10.244.1.9", "10.96.0.9:80", *bundles(tmp_path / "on", node(1, **on), node(2)))
    assert "the sender asked" not in said


def test_a_large_packet_needs_links_that_take_it(tmp_path: Path) -> None:
    small = {"net__links.json": node(1)["net/links.json"].replace('"eth0", "flags": ["UP"], "mtu": 1500', '"eth0", "flags": ["UP"], "mtu": 1400')}  # fmt: skip
    both = bundles(tmp_path, node(1, **small), node(2))
    assert "1450 bytes with DF set do not fit through eth0 (mtu 1400)" in trace(
        "10.244.1.9", "10.244.2.7:80", *both, "--size", 1450
    )
    assert "delivered to 10.244.2.7:80" in trace("10.244.1.9", "10.244.2.7:80", *both, "--size", 1400)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("ip_forward = 1", "ip_forward = 0", "this node passes nothing on: net.ipv4.ip_forward is 0"),
        ("conf.all.rp_filter = 0", "conf.all.rp_filter = 1", ""),
        ("conf.cni0.rp_filter = 0", "conf.cni0.rp_filter = 1", "rp_filter is strict on cni0"),
    ],
)
def test_settings_decide(tmp_path: Path, old: str, new: str, told: str) -> None:
    changed = {"net__sysctls.txt": node(1)["net/sysctls.txt"].replace(old, new)}
    both = bundles(tmp_path, node(1, **changed), node(2))
    said = trace("10.244.2.7" if "rp_filter is" in told else "10.244.1.9", "10.244.2.7:80", *both, *(["--node", "node-1", "--iif", "cni0"] if told else []))  # fmt: skip
    assert (told or "delivered to 10.244.2.7:80") in said


def test_a_known_connection_skips_nat(tmp_path: Path) -> None:
    line = (
        "tcp 6 99 ESTABLISHED src=10.244.2.7 dst=10.96.0.9 sport=40000 dport=80 "
        "src=10.244.1.8 dst=10.244.2.7 sport=8080 dport=40000 [ASSURED] use=1\n"
    )
    both = bundles(tmp_path, node(1, **{"net__conntrack-4.txt": line}), node(2))
    words = ("10.244.2.7", "10.96.0.9:80", "--node", "node-1", "--iif", "eth0", *both)
    assert ends(*words) == {"10.244.1.7:8080": "1/2", "10.244.2.7:8080": "1/2"}
    assert "1 known connection(s) from here to there go to 10.244.1.8:8080" in trace(*words)
    assert ends(*words, "--sport", 40000) == {"10.244.1.8:8080": "1"}


@pytest.mark.parametrize(
    ("dump", "question", "shares"),
    [
        (
            "appname-backend.listing",
            ("outside", "10.3.49.200:31103", "--node-ip", "10.3.49.200"),
            {"10.3.34.219:3001": "1/2", "10.3.57.124:3001": "1/2"},
        ),
        (
            "app.ipvsadm",
            ("172.30.3.9", "172.31.12.98:50051", "--iif", "cni0"),
            {f"172.30.{end}:50051": "1/4" for end in ("0.12", "0.16", "3.12", "3.13")},
        ),
    ],
)
def test_walks_that_people_made_by_hand(dump: str, question: tuple[str, ...], shares: dict[str, str]) -> None:
    assert ends(*question, "--rules", DUMPS / dump) == shares


@pytest.mark.parametrize(
    ("dump", "question", "known", "count"),
    [
        ("testsvc.listing", ("10.0.0.9", "172.30.5.207:443"), "172.31.9.52:80", 7),
        ("redis-and-traefik.rules", ("10.244.1.9", "10.96.7.210:6379"), "10.244.5.216:6379", 6),
    ],
)
def test_shares_of_a_ladder_with_old_decimals(dump: str, question: tuple[str, ...], known: str, count: int) -> None:
    """Of all endpoints the article shows one; the others' chains are missing, and their shares are told all the same."""
    data = json.loads(trace(*question, "--rules", DUMPS / dump, "-o", "json"))
    assert len(data["ends"]) == count
    for each in data["ends"]:
        assert abs(Fraction(each["probability"]) - Fraction(1, count)) < Fraction(1, 10_000)
        if each["fate"] == "unknown":
            assert "is not in the input" in each["reason"]
        else:
            assert f"{each['address']}:{each['port']}" == known
    assert [each["fate"] for each in data["ends"]].count("unknown") == count - 1


def test_a_load_balancers_address_with_local_policy_leads_to_the_local_pod() -> None:
    words = ("outside", "192.168.15.1:80", "--rules", DUMPS / "redis-and-traefik.rules")
    said = trace(*words)
    assert "Balancing rule 0 for kube-system/traefik-load-balance-service:web" in trace(*words, "--all")
    assert "unknown: chain KUBE-SEP-EUB52TCTNKDY6XP4 of table nat is not in the input" in said
    assert "Service port  kube-system/traefik-load-balance-service:web" in said


def test_one_text_may_hold_rules_and_routes(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text(
        HELLO.read_text() + "\n$ ip r\n10.244.3.0/24 dev cni0 proto kernel scope link src 10.244.3.1\n"
    )
    assert "10.244.3.81: over cni0, straight to it" in trace(
        "10.244.0.5", "10.106.183.112:4000", "--rules", tmp_path / "all.txt"
    )


def test_a_text_that_tells_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "prose.txt").write_text("It does not work.\n")
    assert "prose.txt: holds nothing that is known" in trace(
        "outside", "10.0.0.1:80", "--rules", tmp_path / "prose.txt", fails=True
    )


def flannel(number: int, **more: str) -> dict[str, str]:
    """The same node with flannel's VXLAN to the other."""
    other = 3 - number
    parts = node(number)
    vxlan = {
        "ifname": "flannel.1",
        "flags": ["UP"],
        "mtu": 1450,
        "linkinfo": {
            "info_kind": "vxlan",
            "info_data": {"id": 1, "local": f"10.0.0.{number}", "port": 8472, "link": "eth0"},
        },
    }
    routes = [each for each in json.loads(parts["net/routes-4.json"]) if each["dst"] != f"10.244.{other}.0/24"]
    routes.append(
        {"dst": f"10.244.{other}.0/24", "gateway": f"10.244.{other}.0", "dev": "flannel.1", "flags": ["onlink"]}
    )
    conf = "".join(f"net.ipv4.conf.flannel/1.{key} = 0\n" for key in ("rp_filter", "accept_local", "route_localnet"))
    neighbour = {
        "dst": f"10.244.{other}.0",
        "dev": "flannel.1",
        "lladdr": f"02:00:00:00:00:0{other}",
        "state": ["PERMANENT"],
    }
    return {
        **parts,
        "net/links.json": json.dumps([*json.loads(parts["net/links.json"]), vxlan]),
        "net/routes-4.json": json.dumps(routes),
        "net/neighbours.json": json.dumps([neighbour]),
        "net/fdb.json": json.dumps(
            [{"mac": f"02:00:00:00:00:0{other}", "ifname": "flannel.1", "dst": f"10.0.0.{other}"}]
        ),
        "net/sysctls.txt": parts["net/sysctls.txt"] + conf,
        **{name.replace("__", "/"): text for name, text in more.items()},
    }


def test_a_vxlan_is_followed_into_the_next_node_and_back(tmp_path: Path) -> None:
    said = trace("10.244.1.9", "10.244.2.7:80", *bundles(tmp_path, flannel(1), flannel(2)), "--all")
    for told in (
        "neighbour    10.244.2.0 is 02:00:00:00:00:02",
        "overlay      put into a packet to 10.0.0.2 (VXLAN 1, udp port 8472)",
        "  node node-2\n  overlay      taken out of it, in by flannel.1",
        "    node node-1\n    overlay      taken out of it, in by flannel.1",
        "delivered to 10.244.1.9, which sees 10.244.2.7",
    ):
        assert told in said
    assert "1451 bytes with DF set do not fit through flannel.1 (mtu 1450)" in trace(
        "10.244.1.9", "10.244.2.7:80", *bundles_in(tmp_path / "mtu", flannel(1), flannel(2)), "--size", 1451
    )


DROP_OVERLAY = "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p udp -m udp --dport 8472 -j DROP\nCOMMIT\n"


@pytest.mark.parametrize(
    ("number", "changes", "told"),
    [
        (
            1,
            {"net__fdb.json": "[]"},
            "flannel.1 does not know where 10.244.2.0 is: no neighbour and no forwarding entry",
        ),
        (1, {"net__neighbours.json": "[]"}, "flannel.1 does not know where 10.244.2.0 is"),
        (2, {"rules__iptables-legacy.txt": DROP_OVERLAY}, "the overlay's own packet, on node node-2: a rule drops it"),
        (2, {"net__links.json": "[]"}, "node node-2 has no VXLAN 1"),
    ],
)
def test_what_an_overlay_lacks_is_said(tmp_path: Path, number: int, changes: dict[str, str], told: str) -> None:
    nodes = [flannel(each, **(changes if each == number else {})) for each in (1, 2)]
    assert told in trace("10.244.1.9", "10.244.2.7:80", *bundles(tmp_path, *nodes))


def bundles_in(path: Path, *nodes: dict[str, str]) -> list[str]:
    path.mkdir()
    return bundles(path, *nodes)


def test_a_bundle_among_the_rules_gives_all_its_parts(tmp_path: Path) -> None:
    _, path = bundles(tmp_path, node(1))
    said = trace("outside", "10.0.0.1:30080", "--rules", path)
    assert "10.0.0.1:30080 becomes the endpoint (DNAT)" in said
    assert "the endpoint: over cni0, straight to it" in said and f"{path}:net/routes-4.json" in said
