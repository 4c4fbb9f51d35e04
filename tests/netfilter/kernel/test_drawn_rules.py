"""Rule sets that nobody thought of: what the walk says of a packet is what the kernel does to it.

A thousand rule sets are loaded at once, each for packets of one source, read back as the tools print them, and met by one
packet each. Where chance decides, what happened has to be among what can happen. A failure prints the seed: NARTHEX_SEED
draws the same again.
"""

import os
import random

import pytest
from tests.netfilter.kernel.drawn_rules import IPSETS, SaveCase, numbers, save_script
from tests.netfilter.kernel.drawn_rules_nft import NftCase, nft_scripts
from tests.proxy.kernel.packet_range import IIF, OIF, OWN, SENDERS, Range

from narthex.linux.run import run
from narthex.model.net import IPFamily, Protocol, contains
from narthex.model.packet import Disposition, Host, Packet
from narthex.netfilter.dump.read import merge_dumps, read_dump
from narthex.netfilter.walk.walk import HookPoint, HookWalk

pytestmark = pytest.mark.kernel

COUNT = 1000
_ENDS = {Disposition.DROPPED: "nothing", Disposition.REJECTED: "refused", Disposition.UNSUPPORTED: "unknown"}


@pytest.fixture
def place():
    with Range() as made:
        yield made


@pytest.fixture
def draw():
    seed = os.environ.get("NARTHEX_SEED", "1")
    made = random.Random(seed)
    made.seed_text = seed
    return made


def predicted(rules, shot):
    """Where the packet can end, each end with why; the node's routes are those of the range."""
    packet = Packet(
        source=shot.source,
        destination=shot.destination,
        port=shot.port,
        protocol=Protocol(shot.protocol.upper()),
        source_port=shot.source_port,
        iif=IIF,
    )
    hooks = HookWalk(rules.ruleset, packet, Host(addresses=OWN), objects=rules.objects)
    ends = {}

    def through(place, branches):
        passed, ended = hooks.hook(place, branches)
        for branch, end in ended:
            if not branch.doubt:
                ends[_ENDS[end.disposition]] = f"{end.note} {branch.probability}"
        return [branch for branch in passed if not branch.doubt]

    arrived = through(HookPoint("prerouting", iif=IIF), [hooks.start()])
    here = [branch for branch in arrived if hooks.local(branch.daddr)]
    for branch in through(HookPoint("input", iif=IIF), here):
        ends["here", branch.daddr, branch.dport, branch.saddr or shot.source] = ""
    for branch in arrived:
        if hooks.local(branch.daddr):
            continue
        oif = IIF if contains(SENDERS, branch.daddr) else OIF
        for sent in through(HookPoint("forward", iif=IIF, oif=oif), [branch]):
            for out in through(HookPoint("postrouting", iif=IIF, oif=oif), [sent]):
                own = OWN[1] if oif == OIF else OWN[0]
                seen = [out.saddr] if out.saddr else [shot.source]
                if out.masquerade and not out.saddr:
                    seen = [own, *(f"10.50.255.{number}" for number in (1, 2, 3))]
                for source in seen:
                    ends["there", out.daddr, out.dport, source] = ""
    return ends


def judge(place, cases, rules, draw):
    done = place.shoot([case.shot for case in cases])
    wrong = []
    unknown = 0
    told = dict.fromkeys(("there", "here", "refused", "nothing"), 0)
    for case, got in zip(cases, done, strict=True):
        can = predicted(rules, case.shot)
        unknown += "unknown" in can
        told[got if isinstance(got, str) else got[0]] += 1
        if got not in can:
            wrong.append(f"case {case.number}: {case.shot!r}: the walk says {can}, the kernel did {got}\n{case.text()}")
    assert not wrong, f"seed {draw.seed_text}: {len(wrong)} of {len(cases)} wrong\n\n" + "\n\n".join(wrong[:3])
    assert unknown == 0, f"seed {draw.seed_text}: {unknown} not understood"
    assert min(told.values()) > len(cases) // 50, f"seed {draw.seed_text}: too few ends of a kind: {told}"


@pytest.mark.parametrize("tool", ["iptables-nft", "iptables-legacy"])
def test_iptables(place, draw, tool):
    cases = [SaveCase(draw, number) for number in numbers(COUNT if tool == "iptables-nft" else COUNT // 4)]
    run(["ipset", "restore"], stdin=IPSETS, namespace=place.node)
    run([f"{tool}-restore"], stdin=save_script(cases), namespace=place.node)
    dumps = [
        read_dump(run([f"{tool}-save"], namespace=place.node), "rules"),
        read_dump(run(["ipset", "save"], namespace=place.node), "sets"),
    ]
    dump = merge_dumps(dumps)
    assert not dump.problems and not dump.check()
    judge(place, cases, dump.for_family(IPFamily.IPV4), draw)


@pytest.mark.parametrize("form", ["text", "json"])
def test_nft(place, draw, form):
    cases = [NftCase(draw, number) for number in numbers(COUNT if form == "text" else COUNT // 4)]
    for script in nft_scripts(cases):
        run(["nft", "-f", "-"], stdin=script, namespace=place.node)
    dump = read_dump(run(["nft", *(["-j"] if form == "json" else []), "list", "ruleset"], namespace=place.node), form)
    assert not dump.problems and not dump.check()
    judge(place, cases, dump.for_family(IPFamily.IPV4), draw)
