"""A probe's answer and the kernel's steps beside the prediction, and what the verdict says of replies."""

from fractions import Fraction

import msgspec
import pytest

from narthex.netfilter.dump.kernel_trace import ChainVisit, KernelStep, KernelTrace, TracedPacket, TraceEvent
from narthex.trace.follow.align import Alignment, align, with_answer
from narthex.trace.model import Fate, Header, PacketPath, Party, PathBranch, PathEnd, PathStep, Stage
from narthex.trace.render.verdict import judge

LOST = PathEnd(fate=Fate.LOST, reason="partition")
BACK = PathBranch(end=PathEnd(fate=Fate.DELIVERED))
RULE = PathStep(stage=Stage.FORWARD, node="a", table="t", chain="c", verdict="accept", what="accept")


def path(*ends: PathEnd, protocol: str = "tcp", steps: tuple[PathStep, ...] = ()) -> PacketPath:
    """A path that splits into these ends; `steps` lead to the first."""
    branches = tuple(PathBranch(end=end, steps=steps if end is ends[0] else ()) for end in ends)
    return PacketPath(
        packet=Header(source="10.0.0.1", destination="10.0.0.2", protocol=protocol, port=80),
        source=Party(address="10.0.0.1"),
        destination=Party(address="10.0.0.2"),
        tree=PathBranch(branches=branches),
    )


def delivered(reply: PathBranch = BACK) -> PathEnd:
    return PathEnd(fate=Fate.DELIVERED, reply=reply)


@pytest.mark.parametrize(
    ("found", "answer", "agrees"),
    [
        (path(LOST), "connected", False),
        (path(LOST), "nothing", True),
        (path(LOST, delivered()), "connected", True),
        (path(LOST, delivered()), "nothing", True),
        (path(delivered(PathBranch(end=LOST))), "connected", False),
        (path(delivered()), "nothing", False),
        (path(delivered()), "refused", True),
        (path(delivered(), protocol="udp"), "nothing", True),
    ],
)
def test_the_answer_is_compared_too(found: PacketPath, answer: str, agrees: bool) -> None:
    compared = with_answer(Alignment(agrees=True, pairs=()), found, answer)
    assert compared.agrees is agrees
    assert bool(compared.parting) is not agrees


def test_a_packet_that_may_be_lost_before_the_rules_need_not_be_seen() -> None:
    assert align(path(delivered(), LOST, steps=(RULE,)), None, "a").agrees
    assert not align(path(delivered(), steps=(RULE,)), None, "a").agrees


def traced(*moves: tuple[str, str]) -> KernelTrace:
    """What the kernel reports of these tables and verdicts."""
    steps = (
        KernelStep(event=TraceEvent.RULE, family="ip", table=name, chain="c", verdict=verdict, rule="x")
        for name, verdict in moves
    )
    return KernelTrace(number="1", visits=(ChainVisit(packet=TracedPacket(), steps=tuple(steps)),))


@pytest.mark.parametrize(
    ("kernel", "predicted", "agrees", "noted"),
    [
        ("ab", "ab", True, False),
        ("ba", "ab", True, True),
        ("cab", "abc", True, True),
        # What comes behind a drop is not reached.
        ("D", "aD", True, True),
        ("aD", "aD", True, False),
        # Neither are other nat chains behind one that rewrites the packet.
        ("M", "aM", True, True),
        ("aM", "aM", True, False),
        ("aMb", "aMb", True, False),
        ("a", "ab", False, False),
        ("abc", "ab", False, False),
        ("ax", "ab", False, False),
    ],
)
def test_tables_of_one_hook_may_run_in_another_order(kernel: str, predicted: str, agrees: bool, noted: bool) -> None:
    verdicts = {name: "drop" if name == "D" else "accept" for name in kernel + predicted}
    shown = {**verdicts, "M": "masquerade"}
    steps = tuple(
        PathStep(stage=Stage.FORWARD, node="a", table=name, chain="c", verdict=shown[name], what=name)
        for name in predicted
    )
    found = align(path(delivered(), steps=steps), traced(*((name, verdicts[name]) for name in kernel)), "a")
    assert found.agrees is agrees
    assert bool(found.notes) is noted


def test_only_the_first_pass_of_a_routing_loop_is_compared() -> None:
    stages = (Stage.PREROUTING, Stage.FORWARD) * 2
    steps = tuple(PathStep(stage=each, node="a", table="t", chain="c", verdict="accept", what="x") for each in stages)
    assert align(path(LOST, steps=steps), traced(("t", "accept"), ("t", "accept")), "a").agrees


def test_later_passes_of_a_routing_loop_may_follow_in_the_kernels_trace() -> None:
    def looping(*stages: Stage) -> PacketPath:
        return path(
            LOST,
            steps=tuple(
                PathStep(stage=each, node="a", table="t", chain="c", verdict="accept", what="x") for each in stages
            ),
        )

    kernel = traced(*(("t", "accept"),) * 4)
    once = (Stage.PREROUTING, Stage.FORWARD, Stage.POSTROUTING)
    assert align(looping(*once, Stage.FORWARD, Stage.POSTROUTING), kernel, "a").agrees
    assert not align(looping(*once), kernel, "a").agrees


def test_a_relay_accepts_what_it_cannot_pass_on() -> None:
    relayed = (PathStep(stage=Stage.RELAY, node="a", what="accepts"),)
    assert with_answer(Alignment(agrees=True, pairs=()), path(LOST, steps=relayed), "connected").agrees
    assert not with_answer(Alignment(agrees=True, pairs=()), path(LOST, steps=relayed), "nothing").agrees
    lost = path(LOST, steps=relayed, protocol="udp")
    assert not with_answer(Alignment(agrees=True, pairs=()), lost, "answered").agrees


def test_a_share_of_lost_replies_counts_with_its_probability() -> None:
    end = {True: PathEnd(fate=Fate.DELIVERED, address="10.0.0.2"), False: LOST}
    reply = PathBranch(
        branches=tuple(
            PathBranch(probability=Fraction(share, 10), end=end[arrives]) for share, arrives in ((3, False), (7, True))
        )
    )
    there = msgspec.structs.replace(end[True], reply=reply)
    verdict = judge(path(there))
    assert verdict.word == "fails in 30 % (3/10)"
    assert [(str(each.share), each.text) for each in verdict.reasons] == [
        ("3/10", "the reply is lost: partition"),
        ("7/10", "delivered to 10.0.0.2"),
    ]
