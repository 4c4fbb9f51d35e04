"""`narthex diff`: by meaning first, and quiet when nothing differs."""

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
    assert (status, said.splitlines()[0]) == (1, told)


def test_a_part_that_one_side_lacks_cannot_be_told(tmp_path: Path) -> None:
    one = bundle(tmp_path / "a.tgz", TWO)
    write_file(
        tmp_path / "b.tgz",
        BundleManifest(node="n", writer="test"),
        {"rules/iptables-nft.txt": NAT.format(rules=TWO, n=0)},
    )
    status, said = diff(one, str(tmp_path / "b.tgz"))
    assert status == 2
    assert "cannot tell: routes: not known in" in said


MANIFESTS = Path(__file__).parents[2] / "examples" / "shop"
MODE = ("--manifests", str(MANIFESTS), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16")


def test_two_modes_of_the_same_objects() -> None:
    assert diff("nftables", "iptables", *MODE) == (0, "")
    status, told = diff("nftables", "userspace", *MODE, "-o", "json")
    assert status == json.loads(told)["status"]
    status, told = diff("nftables", "nonsense", *MODE)
    assert status == 2
    assert "'nonsense' is not a bundle" in told
