"""`narthex diff`: by meaning first, and quiet when nothing differs."""

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program.bundle import write_file

NAT = """\
*nat
:PREROUTING ACCEPT [{n}:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-A - [0:0]
[{n}:60] -A PREROUTING -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m tcp --dport 80 -j KUBE-SVC-A
{rules}COMMIT
"""
TWO = (
    "-A KUBE-SVC-A -m statistic --mode random --probability 0.50000000000 -j DNAT --to-destination 10.1.0.7:80\n"
    "-A KUBE-SVC-A -p tcp -j DNAT --to-destination 10.1.0.8:80\n"
)
SAME = TWO.replace("-A KUBE-SVC-A -m", "-A KUBE-SVC-A -m comment --comment other -m", 1)
ONE = "-A KUBE-SVC-A -p tcp -j DNAT --to-destination 10.1.0.8:80\n"


def bundle(path: Path, rules: str, n: int = 0, **more: str) -> str:
    parts = {
        "rules/iptables-nft.txt": NAT.format(rules=rules, n=n),
        "net/routes-4.json": '[{"dst": "default", "gateway": "10.0.0.1", "dev": "eth0"}]',
        "net/routes-6.json": "[]",
        "net/sysctls.txt": "net.ipv4.ip_forward = 1\n",
        "net/links.json": '[{"ifname": "eth0", "flags": ["UP"], "mtu": 1500}]',
        **{name.replace("__", "/"): text for name, text in more.items()},
    }
    write_file(path, BundleManifest(node="n", writer="test"), parts)
    return str(path)


def diff(*words: str) -> tuple[int, str]:
    """Return the exit status, and the output without the lines about what was not compared."""
    status, told = whole(*words)
    return status, "".join(line for line in told.splitlines(keepends=True) if not line.startswith("not compared: "))


def whole(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["diff", *words])
    return done.exit_code, done.output


def test_nothing_is_said_of_what_is_the_same(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a.tgz", TWO, 5)
    assert diff(one, bundle(tmp_path / "b.tgz", TWO, 900)) == (0, "")
    assert diff(one, bundle(tmp_path / "c.tgz", SAME)) == (0, "")


def test_rules_that_mean_the_same_differ_in_their_text_when_that_is_asked(tmp_path: Path) -> None:
    status, told = diff(bundle(tmp_path / "a.tgz", TWO), bundle(tmp_path / "b.tgz", SAME), "--text")
    assert status == 1
    assert told.startswith("rules/iptables-nft.txt: 1 line(s) only before, 1 only after")


def test_shares_that_differ_are_told_exactly(tmp_path: Path) -> None:
    status, told = diff(bundle(tmp_path / "a.tgz", TWO), bundle(tmp_path / "b.tgz", ONE))
    assert status == 1
    assert told.splitlines() == [
        "frontend: 10.96.0.9:80/tcp",
        "  - 1/2 to 10.1.0.7:80, 1/2 to 10.1.0.8:80",
        "  + 1 to 10.1.0.8:80",
    ]


@pytest.mark.parametrize(
    ("part", "text", "told"),
    [
        ("net__sysctls.txt", "net.ipv4.ip_forward = 0\n", "sysctls: net.ipv4.ip_forward"),
        ("net__routes-4.json", "[]", "routes: 0.0.0.0/0 table main"),
        ("net__links.json", '[{"ifname": "eth0", "flags": ["UP"], "mtu": 1400}]', "links: eth0"),
    ],
)
def test_parts_that_differ(tmp_path: Path, part: str, text: str, told: str) -> None:
    other = bundle(tmp_path / "b.tgz", TWO, **{part: text})
    status, said = diff(bundle(tmp_path / "a.tgz", TWO), other)
    assert (status, told in said.splitlines()) == (1, True)


def test_a_part_that_one_side_lacks_cannot_be_told(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a.tgz", TWO)
    write_file(
        tmp_path / "b.tgz",
        BundleManifest(node="n", writer="test"),
        {"rules/iptables-nft.txt": NAT.format(rules=TWO, n=0)},
    )
    status, said = diff(one, str(tmp_path / "b.tgz"))
    assert status == 2
    assert "cannot tell: routes: unknown in" in said


MANIFESTS = Path(__file__).parents[2] / "examples" / "shop"
MODE = ("--manifests", str(MANIFESTS), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16")


@pytest.mark.parametrize(
    "pair", [*itertools.permutations(("iptables", "nftables", "ipvs"), 2), ("iptables", "userspace")]
)
def test_two_modes_differ_where_a_migration_changes_something(pair: tuple[str, str]) -> None:
    before, after = pair
    moved = CliRunner().invoke(main, ["migrate", "--from", before, "--to", after, *MODE, "-o", "json"])
    changes = json.loads(moved.stdout)
    status, told = diff(before, after, *MODE, "-o", "json")
    found = json.loads(told)
    assert len(found["found"]) == len(changes["changes"]) + len(changes["differences"])
    assert (status, moved.exit_code) == ((1, 3) if found["found"] else (0, 0))


def test_a_mode_and_itself_and_a_word_that_is_no_mode() -> None:
    assert whole("nftables", "nftables", *MODE) == (0, "")
    status, told = diff("nftables", "nonsense", *MODE)
    assert status == 2
    assert "'nonsense' is not a file or bundle" in told


def pasted(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_texts_that_were_pasted_are_compared_like_bundles(tmp_path: Path) -> None:
    filters = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"
    two, one = (NAT.format(rules=rules, n=0) + filters for rules in (TWO, ONE))
    save = pasted(tmp_path / "a.txt", two)
    status, told = whole(save, pasted(tmp_path / "b.txt", one))
    assert status == 1
    assert "- 1/2 to 10.1.0.7:80, 1/2 to 10.1.0.8:80" in told
    assert "+ 1 to 10.1.0.8:80" in told
    assert "not compared: routes (unknown on either side)" in told
    with_noise = pasted(tmp_path / "c.txt", f"# iptables-save\n{two}")
    assert diff(save, with_noise) == (0, "")


def test_each_side_says_what_it_lacks(tmp_path: Path) -> None:
    whole_rules = pasted(tmp_path / "a.txt", NAT.format(rules=TWO, n=0) + "*filter\n:INPUT ACCEPT [0:0]\nCOMMIT\n")
    nat = pasted(tmp_path / "b.txt", "# iptables-save -t nat\n" + NAT.format(rules=TWO, n=0))
    status, told = whole(whole_rules, nat)
    assert status == 2
    assert f"filter of iptables is not in the input (in {nat})" in told
    assert f"(in {whole_rules})" not in told
    status, told = whole(whole_rules, bundle(tmp_path / "c.tgz", TWO))
    assert f"cannot tell: routes: unknown in {whole_rules}" in told
    status, told = whole(whole_rules, pasted(tmp_path / "d.txt", "a remark"))
    assert status == 2
    assert "d.txt" in told
    assert "no rules" in told


def test_what_is_not_compared_is_said(tmp_path: Path) -> None:
    one, other = bundle(tmp_path / "a.tgz", TWO), bundle(tmp_path / "b.tgz", TWO)
    status, said = whole(one, other)
    assert status == 0
    assert said.splitlines() == [
        "not compared: policies (unknown on either side)",
        "not compared: addresses (unknown on either side)",
        "not compared: packets to addresses of no Service, and packets that the nodes themselves send",
    ]


@pytest.mark.parametrize(
    ("part", "text", "told"),
    [
        (
            "rules__nft.txt",
            "table ip mine {{\n\tchain f {{\n\t\ttype filter hook forward priority 0; policy drop;\n\t}}\n}}\n",
            "dropped",
        ),
        (
            "rules__nft.txt",
            "table ip mine {{\n\tchain p {{\n\t\ttype nat hook postrouting priority 100; policy accept;\n\t\tmasquerade\n\t}}\n}}\n",
            "(masqueraded)",
        ),
        ("net__sysctls.txt", "net.ipv4.ip_forward = 0\n", "ip_forward is 0"),
    ],
)
def test_what_packets_meet_after_the_rewriting(tmp_path: Path, part: str, text: str, told: str) -> None:
    other = bundle(tmp_path / "b.tgz", ONE, **{part: text.replace("{{", "{").replace("}}", "}")})
    status, said = diff(bundle(tmp_path / "a.tgz", ONE), other)
    assert status == 1
    lines = said.splitlines()
    assert lines[lines.index("frontend: 10.96.0.9:80/tcp") + 1] == "  - 1 to 10.1.0.8:80"
    assert told in lines[lines.index("frontend: 10.96.0.9:80/tcp") + 2]


# ---- two nodes -------------------------------------------------------------------------------------------------------


def node(path: Path, number: int, *, mtu: int = 1500, pods: tuple[int, ...] = (7,), local: bool = False) -> str:
    """Write the bundle of one of three nodes: its address, its pods' network, and routes to the pods of the others."""
    own, bridge = f"10.0.0.{number}", f"10.244.{number}.1"
    addresses = [
        {"ifname": "eth0", "addr_info": [{"local": own, "prefixlen": 24, "scope": "global"}]},
        {"ifname": "cni0", "addr_info": [{"local": bridge, "prefixlen": 24, "scope": "global"}]},
    ]
    links = [
        {"ifname": "eth0", "flags": ["UP"], "mtu": mtu},
        {"ifname": "cni0", "flags": ["UP"], "mtu": 1450, "linkinfo": {"info_kind": "bridge"}},
        *(
            {
                "ifname": f"veth{number}{pod}",
                "flags": ["UP"],
                "mtu": 1450,
                "master": "cni0",
                "linkinfo": {"info_kind": "veth"},
            }
            for pod in pods
        ),
    ]
    routes = [
        {"dst": "default", "gateway": "10.0.0.254", "dev": "eth0"},
        {"dst": "10.0.0.0/24", "dev": "eth0", "prefsrc": own, "scope": "link"},
        {"dst": f"10.244.{number}.0/24", "dev": "cni0", "prefsrc": bridge, "scope": "link"},
        *(
            {"dst": f"10.244.{other}.0/24", "gateway": f"10.0.0.{other}", "dev": "eth0"}
            for other in (1, 2, 3)
            if other != number
        ),
    ]
    to = f"10.244.{number}.7" if local else "10.244.1.7"
    parts = {
        "rules/iptables-nft.txt": NAT.format(rules=f"-A KUBE-SVC-A -p tcp -j DNAT --to-destination {to}:80\n", n=0),
        "net/routes-4.json": json.dumps(routes),
        "net/routes-6.json": "[]",
        "net/addresses.json": json.dumps(addresses),
        "net/links.json": json.dumps(links),
        "net/sysctls.txt": f"net.ipv4.ip_forward = 1\nnet.ipv4.conf.veth{number}7.rp_filter = 0\n",
    }
    write_file(path, BundleManifest(node=f"node-{number}", writer="test"), parts)
    return str(path)


def test_what_two_nodes_always_differ_in_is_folded(tmp_path: Path) -> None:
    one, other = node(tmp_path / "a.tgz", 1), node(tmp_path / "b.tgz", 2, pods=(7, 8))
    status, said = diff(one, other)
    assert status == 0
    (line,) = said.splitlines()
    assert line.startswith("folded (own addresses and own pods of two nodes; --all shows them): ")
    assert {"routes", "links", "addresses", "sysctls"} <= set(line.replace(",", "").split())
    status, said = diff(one, other, "--all")
    assert status == 1
    assert "addresses: 10.0.0.1/24" in said


def test_what_is_not_theirs_alone_is_shown(tmp_path: Path) -> None:
    status, said = diff(node(tmp_path / "a.tgz", 1), node(tmp_path / "b.tgz", 2, mtu=1400))
    assert status == 1
    assert said.splitlines()[:3] == ["links: eth0", "  - link mtu 1500 up", "  + link mtu 1400 up"]


def test_endpoints_of_a_local_policy_are_folded_and_others_are_not(tmp_path: Path) -> None:
    one, other = node(tmp_path / "a.tgz", 1, local=True), node(tmp_path / "b.tgz", 2, local=True)
    status, said = diff(one, other)
    assert (status, "frontend" in said.splitlines()[-1]) == (0, True)
    status, said = diff(one, node(tmp_path / "c.tgz", 3))
    assert (status, said.count("10.96.0.9")) == (0, 0)
    same = json.loads(whole(one, other, "-o", "json")[1])
    assert {each["part"] for each in same["folded"]} >= {"frontend", "routes"}


def test_a_node_and_itself_with_another_address_are_not_folded(tmp_path: Path) -> None:
    parts = {"net__addresses.json": '[{"ifname": "eth0", "addr_info": [{"local": "10.0.0.%s", "prefixlen": 24}]}]'}
    one, other = (
        bundle(tmp_path / f"{number}.tgz", TWO, **{name: text % number for name, text in parts.items()})
        for number in (5, 6)
    )
    status, said = diff(one, other)
    assert (status, said.count("addresses: ")) == (1, 2)
