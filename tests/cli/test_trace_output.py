"""`narthex trace -o …` over dumps: every form is whole, and the cause is told in each that has words."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from narthex.cli import main

DUMPS = Path(__file__).parents[1] / "dumps"
HELLO = DUMPS / "hello-world.iptables-save"
ARRIVES = ("outside", "10.0.0.5:30001", "--rules", str(HELLO), "--node-ip", "10.0.0.5")
DROPPED = """\
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
"""
ROUTES = "10.244.1.0/24 dev cni0 proto kernel scope link src 10.244.1.1\n10.244.2.0/24 via 192.0.2.2 dev eth0\n"


def trace(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, ["trace", *words])
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture
def dropped(tmp_path: Path) -> tuple[str, ...]:
    for name, text in (("rules", DROPPED), ("routes", ROUTES)):
        (tmp_path / name).write_text(text)
    return "10.244.1.5", "10.244.2.7:80", "--rules", str(tmp_path / "rules"), "--rules", str(tmp_path / "routes")


def test_drawn_forms_are_whole(dropped: tuple[str, ...]) -> None:
    for words in (ARRIVES, dropped):
        ET.fromstring(trace(*words, "-o", "svg"))
        ET.fromstring(trace(*words, "-o", "html").removeprefix("<!DOCTYPE html>"))
        assert trace(*words, "-o", "dot").startswith("digraph way {")
        assert trace(*words, "-o", "mermaid").startswith("flowchart TD\n")


def test_the_cause_is_told_in_every_form_that_has_words(dropped: tuple[str, ...]) -> None:
    said = trace(*dropped)
    assert "Why not (likely): chain FORWARD of table filter drops" in said
    assert "more  docs/reference/causes/forward-drop.md" in said
    findings = json.loads(trace(*dropped, "-o", "json"))["findings"]
    assert [each["cause"] for each in findings] == ["forward-drop"]
    assert set(findings[0]) == {
        "cause", "title", "page", "certain", "explains", "sentence", "evidence", "advice", "node"
    }  # fmt: skip
    for form in ("svg", "html"):
        assert "Why not: chain FORWARD" in trace(*dropped, "-o", form)


def test_a_path_that_is_whole_has_no_cause() -> None:
    assert "Why not" not in trace(*ARRIVES)
    assert json.loads(trace(*ARRIVES, "-o", "json"))["findings"] == []


def test_paths_by_objects_alone_have_all_forms_and_causes(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "{apiVersion: v1, kind: Node, metadata: {name: a}, status: {addresses: [{type: InternalIP, address: 10.0.0.9}]}}\n---\n"
        "{apiVersion: v1, kind: Service, metadata: {name: web, namespace: shop}, "
        "spec: {clusterIP: 10.96.0.7, ports: [{port: 80}]}}\n"
    )
    words = ("10.0.0.1", "shop/web:80", "--manifests", str(tmp_path))
    picture = trace(*words, "-o", "svg")
    ET.fromstring(picture)
    assert "rejected: the sender" in picture and "Why not: " in picture
    assert trace(*words, "-o", "dot").startswith("digraph way {")
    assert trace(*words, "-o", "mermaid").startswith("flowchart TD")
    assert "Why not: " in trace(*words, "-o", "html") and "Why not: " in trace(*words)
    data = json.loads(trace(*words, "-o", "json"))
    assert data["findings"][0]["explains"] and data["plan"]["agree"]


def test_unknown_has_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "part").write_text("-A KUBE-SVC-ABC -d 10.96.0.7/32 -p tcp -m tcp --dport 80 -j KUBE-SEP-ABC\n")
    words = ("10.244.1.5", "10.96.0.7:80", "--rules", str(tmp_path / "part"))
    for form in ("text", "json", "svg"):
        trace(*words, "-o", form, status=3)
    assert trace(*words, status=3).startswith("? unknown: ")
    assert "3  the path is unknown" in trace("--help")


def test_color_is_for_terminals_or_on_request(dropped: tuple[str, ...]) -> None:
    colored = CliRunner().invoke(main, ["trace", *dropped, "--color", "always"]).output
    bare = trace(*dropped)
    assert "\x1b[31m" in colored and click.unstyle(colored).split() == bare.split()
    assert "\x1b" not in bare + trace(*dropped, "--color", "never")


@pytest.mark.parametrize(("columns", "most"), [("", 80), ("60", 60), ("200", 200)])
def test_lines_fit_the_width(dropped: tuple[str, ...], columns: str, most: int) -> None:
    said = CliRunner(env={"COLUMNS": columns}).invoke(main, ["trace", *dropped, "--all"]).output
    widths = [len(line) for line in said.splitlines()]
    assert max(widths) <= most and max(widths) > most - 30


NFT = """\
table ip own {
\tmap service-ips {
\t\ttype ipv4_addr . inet_proto . inet_service : verdict
\t\telements = { 10.96.0.7 . tcp . 80 : goto to-web }
\t}
\tchain services {
\t\tip daddr . meta l4proto . th dport vmap @service-ips
\t}
\tchain nat-prerouting {
\t\ttype nat hook prerouting priority dstnat; policy accept;
\t\tjump services
\t}
\tchain to-web {
\t\tip protocol tcp dnat to 10.244.1.7:8080 comment "shop/web"
\t}
}
"""


@pytest.mark.parametrize("indent", ["\t", "    ", ""])
@pytest.mark.parametrize("end", [None, -1])
@pytest.mark.parametrize("objects", [False, True])
def test_rules_of_nft_have_their_lines(tmp_path: Path, indent: str, end: int | None, objects: bool) -> None:
    """As nft prints them, pasted with other indentation, without the end, and beside objects."""
    (tmp_path / "nft").write_text("\n".join(NFT.replace("\t", indent).splitlines()[:end]) + "\n")
    words = ["10.244.1.5", "10.96.0.7:80", "--rules", str(tmp_path / "nft"), "--all"]
    if objects:
        (tmp_path / "node.yaml").write_text("{apiVersion: v1, kind: Node, metadata: {name: a}}")
        words += ["--manifests", str(tmp_path / "node.yaml")]
    done = CliRunner(env={"COLUMNS": "300"}).invoke(main, ["trace", *words])
    for line in (7, 11, 14):
        assert f" {tmp_path}/nft:{line}\n" in done.output, done.output
