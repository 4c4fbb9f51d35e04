"""The text of a trace: the verdict and the cause first, shared steps once, and no line that is too long."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.trace.causes.catalogue import Cause, CauseFinding
from narthex.trace.model import (
    Fate,
    Header,
    MissingPart,
    PacketPath,
    Party,
    PathBranch,
    PathEnd,
    PathStep,
    PossibleEnd,
    Stage,
)
from narthex.trace.render.outline import MOST_NAMED
from narthex.trace.render.styled import Span, Style, paragraph, plain
from narthex.trace.render.text import lines, text
from narthex.trace.render.verdict import share_text

SENT = Header(source="10.244.1.5", destination="10.96.0.10", protocol="tcp", port=80)


def to(address: str) -> Header:
    return Header(source="10.244.1.5", destination=address, protocol="tcp", port=8080)


def rule(what: str, chain: str = "KUBE-SERVICES", stage: Stage = Stage.PREROUTING, **more: object) -> PathStep:
    return PathStep(stage=stage, table="nat", chain=chain, what=what, place="nat.txt:7", **more)


def endpoint(address: str, share: Fraction, *steps: PathStep, **end: object) -> PathBranch:
    """A branch to a pod: the rule that rewrites the destination, more steps, and the end."""
    rewrite = rule(f"dnat to {address}:8080", "KUBE-SEP", before=SENT, after=to(address))
    ends = {"fate": Fate.DELIVERED, "address": address, "port": 8080, "name": f"pod shop/web-{address}", **end}
    return PathBranch(steps=(rewrite, *steps), probability=share, end=PathEnd(**ends))


def path(*branches: PathBranch, **more: object) -> PacketPath:
    tree = branches[0] if len(branches) == 1 else PathBranch(steps=(rule("jump KUBE-SVC"),), branches=branches)
    source, destination = Party(address="10.244.1.5", name="pod shop/client"), Party(address="10.96.0.10")
    return PacketPath(packet=SENT, source=source, destination=destination, tree=tree, **more)


def finding(**changed: object) -> CauseFinding:
    fields = {"cause": Cause("forward-drop", "x"), "certain": True, "sentence": "the wall stands", "evidence": ("a brick",), "advice": "open the gate"}  # fmt: skip
    return CauseFinding(**{**fields, **changed})


def body(said: str) -> str:
    """The section of the path."""
    return next(section for section in said.split("\n\n") if section.startswith("Path"))


THIRD = Fraction(1, 3)


def test_endpoints_that_differ_by_their_address_share_their_steps() -> None:
    routing = [PathStep(stage=Stage.ROUTING, what=f"10.244.1.{n}: over cni0, straight to it") for n in (7, 8)]
    away = PathStep(stage=Stage.ROUTING, what="10.244.2.9: over eth0 by way of 192.0.2.2")
    said = text(path(endpoint("10.244.1.7", THIRD, routing[0]), endpoint("10.244.1.8", THIRD, routing[1]), endpoint("10.244.2.9", THIRD, away)))  # fmt: skip
    assert said.startswith("✓ delivered: tcp 10.244.1.5 -> 10.96.0.10:80\n  to one of 3 endpoints\n\nfrom  ")
    assert body(said) == (
        "Path\n"
        "  prerouting   10.96.0.10:80 becomes the endpoint (DNAT)\n"
        "  ├─ 1/3  10.244.1.7:8080  pod shop/web-10.244.1.7\n"
        "  ├─ 1/3  10.244.1.8:8080  pod shop/web-10.244.1.8\n"
        "  │    routing      the endpoint: over cni0, straight to it\n"
        "  └─ 1/3  10.244.2.9:8080  pod shop/web-10.244.2.9\n"
        "       routing      the endpoint: over eth0 by way of 192.0.2.2\n"
        "  ✓ delivered to the endpoint\n"
    )


def test_the_verdict_and_the_cause_come_before_the_path() -> None:
    drop = rule("drop", "FORWARD", Stage.FORWARD)
    end = PathEnd(fate=Fate.DROPPED, reason="a rule drops it silently")
    other = finding(explains=False, certain=False, sentence="it rains", evidence=(), advice="")
    said = text(path(PathBranch(steps=(rule("jump X"), drop), end=end)), [finding(), other])
    assert said == (
        "✕ dropped: tcp 10.244.1.5 -> 10.96.0.10:80\n"
        "  a rule drops it silently\n"
        "\n"
        "Why not: the wall stands\n"
        "  seen  a brick\n"
        "  do    open the gate\n"
        "  more  docs/reference/causes/forward-drop.md\n"
        "\n"
        "from  10.244.1.5, pod shop/client\n"
        "to    10.96.0.10\n"
        "\n"
        "Path\n"
        "  forward      nat FORWARD: drop\n"
        "               nat.txt:7\n"
        "  ✕ dropped: a rule drops it silently\n"
        "\n"
        "Also (likely): it rains\n"
        "  more  docs/reference/causes/forward-drop.md\n"
    )


@pytest.mark.parametrize(
    ("branches", "causes", "first"),
    [
        ((endpoint("10.1.0.1", Fraction(1)),), (), "✓ delivered: tcp 10.244.1.5 -> 10.96.0.10:80\n  to 10.1.0.1:8080, pod"),
        ((endpoint("10.1.0.1", Fraction(1)),), (finding(),), "✕ delivered, and yet it fails: "),
        ((endpoint("10.1.0.1", Fraction(1)),), (finding(certain=False),), "✕ delivered, but it probably fails: "),
        ((endpoint("10.1.0.1", Fraction(1), fate=Fate.LEAVES, reason="far away"),), (), "→ leaves this machine: "),
        (
            (endpoint("10.1.0.1", Fraction(1), reply=PathBranch(end=PathEnd(fate=Fate.LOST, reason="no route"))),),
            (),
            "✕ delivered, but the reply does not arrive: tcp 10.244.1.5 -> 10.96.0.10:80\n  the reply is lost: no route\n",
        ),
        (
            (endpoint("10.1.0.1", THIRD * 2), PathBranch(probability=THIRD, end=PathEnd(fate=Fate.REJECTED, reason="no"))),
            (),
            "✕ fails in 33.3 % (1/3): tcp 10.244.1.5 -> 10.96.0.10:80\n  1/3  no\n  2/3  delivered to 10.1.0.1:8080, pod",
        ),
        (
            (endpoint("10.1.0.1", THIRD), PathBranch(probability=THIRD * 2, end=PathEnd(fate=Fate.UNKNOWN, reason="cut"))),
            (),
            "? unknown in 66.7 % (2/3): tcp 10.244.1.5 -> 10.96.0.10:80\n  2/3  cut\n  1/3  delivered to",
        ),
    ],
)  # fmt: skip
def test_verdicts(branches: tuple[PathBranch, ...], causes: tuple[CauseFinding, ...], first: str) -> None:
    assert text(path(*branches), causes).startswith(first)


def test_what_is_not_known_names_the_next_command_and_is_short() -> None:
    may = (PossibleEnd(when="it leaves by docker0", fate=Fate.DROPPED),)
    end = PathEnd(fate=Fate.UNKNOWN, reason="the text is cut", may=may, supposing=("one", "two", "three", "four"))
    missing = tuple(
        MissingPart(node="", part=part, why=f"no {part}") for part in ("table raw", "table nat", "routes", "routes")
    )
    unknown = path(PathBranch(end=end), next_command="iptables-save -t nat", missing=missing)
    said = text(unknown)
    assert said.startswith(
        "? unknown: tcp 10.244.1.5 -> 10.96.0.10:80\n  the text is cut\n  if it leaves by docker0: dropped\n"
        "  assumed: one\n  assumed: two\n  assumed: three\n  and 1 more assumption; --all lists them\n"
        "  next  run this on the node, and add its output to the input:\n        iptables-save -t nat\n"
    )
    assert said.endswith(
        "\nunknown, and assumed not to affect the packet (3): tables raw, nat; routes\n  (--all says why)\n"
    )
    assert "assumed: four" in text(unknown, every=True)
    assert text(unknown, every=True).endswith("  routes: no routes\n  routes: no routes\n")


def test_rules_are_summed_up_and_shown_with_all() -> None:
    steps = (rule("jump KUBE-SVC"), rule("set mark bits 0x4000"))
    one = endpoint("10.244.1.7", Fraction(1))
    whole = path(PathBranch(steps=(*steps, *one.steps), end=one.end))
    assert body(text(whole)).count("\n") == 3
    shown = text(whole, every=True)
    for line in ("nat KUBE-SERVICES: jump KUBE-SVC", "nat KUBE-SEP: dnat to 10.244.1.7:8080", "nat.txt:7"):
        assert line in shown


@pytest.mark.parametrize("bad", [0, 98])
def test_of_many_endpoints_the_failing_one_is_told_first(bad: int) -> None:
    share = Fraction(1, 99)
    fails = {"fate": Fate.DROPPED, "reason": "a policy"}
    many = [endpoint(f"10.1.0.{n}", share, **(fails if n == bad else {})) for n in range(99)]
    said = text(path(*many))
    first, *others = [line for line in body(said).splitlines() if " 1/99 " in line]
    assert f"10.1.0.{bad}:8080" in first and len(others) == MOST_NAMED
    assert "└─ … and 90 more, 10/11 together; --all lists them\n" in said
    assert text(path(*many), every=True).count(" 1/99 ") == 99 + 1


def test_shares_are_those_that_a_rule_with_decimals_stands_for() -> None:
    assert [share_text(Fraction(each)) for each in ("1/3", "0.33332999", "0.0101010", "1/5000", "0.4143")] == [
        "1/3", "1/3", "1/99", "0.02 %", "29/70"
    ]  # fmt: skip


@given(st.lists(st.text(max_size=60), max_size=12), st.integers(20, 130), st.booleans())
def test_no_line_is_too_long_and_no_word_is_lost(words: list[str], width: int, hang: bool) -> None:
    said = " ".join(words)
    made = list(paragraph(said, width, first=(Span("from: "),), further="  " if hang else None))
    assert all(len(line) <= max(width, 30) for line in plain(made).splitlines())
    joined = "".join(span.text for line in made for span in line[-1:])
    assert [each for each in joined if each.isalnum()] == [each for each in said if each.isalnum()]


@given(st.text(max_size=300), st.integers(60, 140))
def test_any_name_fits(name: str, width: int) -> None:
    one = endpoint("10.244.1.7", Fraction(1, 2), PathStep(stage=Stage.ROUTING, what=name), name=name)
    other = endpoint("10.244.1.8", Fraction(1, 2), rule(name), fate=Fate.DROPPED, reason=name)
    made = lines(path(one, other, service=name), [finding(sentence=name, evidence=(name,))], every=True, width=width)
    assert all(len(line) <= width for line in plain(made).split("\n"))
    assert "\x1b" not in plain(made)


def test_styles_follow_the_verdict() -> None:
    good, bad = (lines(path(endpoint("10.1.0.1", Fraction(1), fate=fate)))[0] for fate in (Fate.DELIVERED, Fate.LOST))
    assert (good[0].style, bad[0].style) == (Style.GOOD, Style.BAD)
