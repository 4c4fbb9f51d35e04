"""Pictures of a journey: well-formed whatever names it holds, bounded, self-contained, and saying the right thing."""

import re
import string
import xml.etree.ElementTree as ET
from fractions import Fraction
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.trace.causes.catalogue import Cause, CauseFinding
from narthex.trace.model import Fate, Header, NearMiss, PacketPath, Party, PathBranch, PathEnd, PathStep, Stage
from narthex.trace.render.drawing import MOST_LANES, draw
from narthex.trace.render.graph import dot, mermaid
from narthex.trace.render.html import page
from narthex.trace.render.svg import svg

HOSTILE = (
    """</text><script>alert(1)</script>"'`\\&#x3c;]]>-->%%{init}%%\x1b[31m\x00\ud800end of #59; line\n; } [x] |y|"""
)
SVG = "{http://www.w3.org/2000/svg}"


def rule(number: int, name: str, verdict: str, **more: object) -> PathStep:
    return PathStep(
        stage=Stage.PREROUTING, node="worker-a", family="ip", table="nat", chain="KUBE-SERVICES",
        rule=f"-A KUBE-SERVICES --comment {name} --number {number}", verdict=verdict, **more,
    )  # fmt: skip


def header(**changed: object) -> Header:
    return Header(**{"source": "10.244.1.5", "destination": "10.96.0.10", "protocol": "tcp", "port": 80, **changed})


def journey(name: str = "shop/web", ways: int = 3, steps: int = 2, bad: int = 1) -> PacketPath:
    """The bad-th way is dropped, the others arrive."""
    near = (NearMiss(table="nat", chain="KUBE-SERVICES", rule=name, missing=name),)
    made = []
    for number in range(ways):
        to = f"10.244.{number}.7"
        arrives = PathEnd(fate=Fate.DELIVERED, node="worker-b", address=to, port=8080, name=name,
                      reply=PathBranch(end=PathEnd(fate=Fate.DELIVERED)))  # fmt: skip
        drop = PathEnd(fate=Fate.DROPPED, node="worker-a", reason=f"policy of {name}")
        after = header(destination=to, port=8080)
        made.append(
            PathBranch(
                steps=(rule(number, name, f"dnat {to}:8080", before=header(), after=after, near=near),),
                probability=Fraction(1, ways),
                end=drop if number == bad else arrives,
            )
        )
    trunk = tuple(rule(number, name, "jump KUBE-SVC-X", why=name) for number in range(steps))
    return PacketPath(
        packet=header(), source=Party(address="10.244.1.5", name=name), destination=Party(address="10.96.0.10"),
        service=name, tree=PathBranch(steps=trunk, branches=tuple(made)), sources=(name,),
    )  # fmt: skip


def finding(name: str = "web") -> CauseFinding:
    return CauseFinding(
        cause=Cause("forward-drop", "dropped"), certain=True, sentence=f"it is {name}", evidence=(name,), advice=name
    )


def texts(picture: str) -> str:
    return " ".join("".join(each.itertext()) for each in ET.fromstring(picture).iter(f"{SVG}text"))


def test_the_failing_way_is_whole_and_the_others_are_faded() -> None:
    picture = svg(draw(journey()), [finding()])
    told = texts(picture)
    assert "fails in 33.3 % (1/3)" in told
    assert "Why not: it is web" in told
    assert "destination 10.96.0.10:80 becomes 10.244.1.7:8080" in told
    assert "becomes 10.244.0.7:8080" not in told
    assert "delivered to 10.244.0.7:8080" in told
    assert "certain; more in docs/reference/causes/forward-drop.md" in told
    root = ET.fromstring(picture)
    faded = [each for each in root.iter(f"{SVG}g") if each.get("class") == "faded"]
    assert len(faded) >= 2
    assert root.get("role") == "img"
    assert "10.96.0.10:80" in (root.findtext(f"{SVG}title") or "")
    assert "first cause: it is web" in (root.findtext(f"{SVG}desc") or "")


def test_a_healthy_journey_has_no_red_and_its_answer_is_told() -> None:
    picture = svg(draw(journey(bad=-1)))
    assert "the answer: delivered" in texts(picture)
    assert 'class="bad' not in picture


def losing_replies(share: Fraction) -> PacketPath:
    """Of the first endpoint's replies, a share is lost; the second one's arrive."""
    path = journey(ways=2, bad=-1)
    lost = PathEnd(fate=Fate.LOST, reason="fault loss 30 % on node worker-b")
    split = PathBranch(
        steps=(rule(1, "reply", "accept"),),
        branches=(
            PathBranch(probability=1 - share, steps=(rule(2, "whole", "accept"),), end=PathEnd(fate=Fate.DELIVERED)),
            PathBranch(probability=share, steps=(rule(3, "broken", "accept"),), end=lost),
        ),
    )
    first, second = path.tree.branches
    assert first.end is not None
    first = msgspec.structs.replace(first, end=msgspec.structs.replace(first.end, reply=split))
    return msgspec.structs.replace(path, tree=msgspec.structs.replace(path.tree, branches=(second, first)))


def test_a_partly_lost_reply_is_drawn_as_a_failure() -> None:
    drawing = draw(losing_replies(Fraction(3, 10)))
    healthy, failing = drawing.trunk.lanes
    assert (healthy.kind, healthy.taken, failing.kind, failing.taken) == ("good", False, "bad", True)
    picture = svg(drawing)
    told = " ".join(texts(picture).split())
    assert "30 % (3/10) of the replies do not arrive" in told
    assert "30 % (3/10) lost: fault loss 30 % on node worker-b" in told
    assert "--comment broken" in told
    assert "--comment whole" not in told
    assert 'class="bad' in picture
    assert 'class="bad' not in svg(draw(losing_replies(Fraction(0))))
    assert 'fillcolor="#ffebe9"' in dot(drawing)


def test_many_ways_are_folded_and_the_failing_one_stays() -> None:
    drawing = draw(journey(ways=100, bad=70))
    assert len(drawing.trunk.lanes) == MOST_LANES
    assert any("dropped" in lane.end for lane in drawing.trunk.lanes)
    assert "92 more branches, 92 %" in drawing.trunk.folded


@pytest.mark.parametrize("steps", [10, 30_000])
def test_size_is_bounded(steps: int) -> None:
    long = journey(name="x" * 5000, ways=50, steps=steps)
    for made in (svg(draw(long), [finding("y" * 5000)]), dot(draw(long)), mermaid(draw(long))):
        assert len(made) < 300_000
    assert len(page(long)) < 20_000_000


def test_stages_that_alternate_for_ever_are_bounded() -> None:
    stages = [Stage.ROUTING, Stage.FORWARD] * 5000
    way = PathBranch(steps=tuple(PathStep(stage=stage, what="x") for stage in stages), end=PathEnd(fate=Fate.LOST))
    drawing = draw(PacketPath(packet=header(), source=Party(address=""), destination=Party(address=""), tree=way))
    assert len(svg(drawing)) < 300_000
    assert "more stages are not drawn" in svg(drawing)


def test_hostile_names_stay_text() -> None:
    hostile = journey(HOSTILE)
    picture, sheet = svg(draw(hostile), [finding(HOSTILE)]), page(hostile, [finding(HOSTILE)])
    for made in (picture, sheet):
        root = ET.fromstring(made.removeprefix("<!DOCTYPE html>\n"))
        assert not [each for each in root.iter() if each.tag.endswith("script")]
        assert "\x1b" not in made
        made.encode()
    parser = Tags()
    parser.feed(sheet)
    assert "script" not in parser.seen
    assert "onload" not in sheet
    for line in mermaid(draw(hostile)).splitlines():
        assert "<script" not in line
        assert re.fullmatch(
            r"flowchart TD|  subgraph a\d+\[\"[^\"]*\"\]|  end|  (  )?n\d+\[\"[^\"]*\"\]|  n\d+ -->(\|\"[^\"]*\"\|)? n\d+"
            r"|  class n\d+ [a-z]+|  classDef .*",
            line,
        ), line


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, _attrs: object) -> None:
        self.seen.add(tag)


@given(st.text(alphabet=st.characters(), max_size=60), st.integers(1, 12))
def test_any_name_gives_whole_files(name: str, ways: int) -> None:
    any_journey = journey(name, ways)
    ET.fromstring(svg(draw(any_journey), [finding(name)]))
    ET.fromstring(page(any_journey, [finding(name)]).removeprefix("<!DOCTYPE html>\n"))
    told = dot(draw(any_journey))
    assert unquoted(told).count("{") == unquoted(told).count("}")
    assert set(unquoted(mermaid(draw(any_journey)))) <= set(string.printable)


def unquoted(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', "", text)


def test_files_need_nothing_beside_them() -> None:
    for made in (svg(draw(journey())), page(journey())):
        addresses = set(re.findall(r"https?://[^\"\s<]*", made))
        assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xhtml"}
        assert not re.search(r"\b(src|href|url\()", made)
        assert "prefers-color-scheme: dark" in made
        assert "@media print" in made
