"""Announcers on real links: the kernel of a client finds out who has an address, while nodes die, leave and lose each
other."""

import json
import os
import signal
import socket
import time

import pytest

from narthex.lb import l2
from narthex.lb.kernel.heartbeats import HeartbeatSockets
from narthex.linux.links import ip_batch
from narthex.linux.namespaces import in_namespace
from narthex.linux.run import run
from narthex.testing.kernel.segment import (
    CLIENT,
    LINK,
    VIP,
    VIP_SIX,
    EthernetSegment,
    RequestStream,
    endpoints,
    node,
    service,
)
from narthex.testing.load import until

pytestmark = pytest.mark.kernel
FAILOVER_LIMIT = 10.0
"""Seconds; what is measured stands in docs/reference/announcer.md, and a machine of the tests may be slow."""


@pytest.fixture(scope="module")
def segment(tmp_path_factory):
    with EthernetSegment(tmp_path_factory.mktemp("segment"), "nxa") as made:
        made.start()
        yield made


@pytest.fixture
def steady(segment):
    """The announcers hear each other, nobody stands back, and one has the addresses."""
    segment.steady()
    return segment


@pytest.fixture
def going(segment):
    """The announcers that are left hear each other, and one has the addresses."""
    segment.ready()
    until(lambda: len(segment.holders()) == 1, "one holder", also=segment.logs)
    return segment


def the_holder(segment):
    (name,) = segment.holders()
    return name


def others(segment, name):
    return sorted(segment.processes.keys() - {name})


def test_the_clients_kernel_finds_one_node_in_both_families(steady):
    holder = the_holder(steady)
    assert {steady.ask(VIP) for _ in range(5)} == {steady.ask(VIP_SIX) for _ in range(5)} == {holder}
    seen = steady.address(holder)
    assert seen["links"] == [LINK] and seen["lastRequest"]["sender"] == "192.0.2.99" and seen["gratuitous"] >= 2
    assert 'metallb_speaker_announced{ip="192.0.2.200"' in steady.metrics(holder)
    for other in others(steady, holder):
        assert steady.address(other)["requests"] == 0 or steady.address(other)["holders"] == [holder]
        assert 'metallb_speaker_announced{ip="192.0.2.200"' not in steady.metrics(other)
    # The neighbour is the link that answered, in both families.
    (mac,) = [link["mac"] for link in steady.state(holder)["links"]]
    for address in (VIP, VIP_SIX):
        (entry,) = json.loads(run(["ip", "-j", "neigh", "show", "to", address], namespace=steady.ns(CLIENT)))
        assert entry["lladdr"] == mac


def test_labels_decide_and_what_would_leave_nobody_is_said(steady):
    label = {"labels": {"node.kubernetes.io/exclude-from-external-load-balancers": ""}}
    holder = the_holder(steady)
    numbers = steady.nodes
    steady.put(node(holder, f"192.0.2.{numbers[holder]}", **label))
    until(lambda: steady.holders() not in ([], [holder]) and len(steady.holders()) == 1, "another", also=steady.logs)
    assert steady.ask() in others(steady, holder)
    steady.put(*(node(name, f"192.0.2.{number}", **label) for name, number in numbers.items()))
    until(lambda: "ignored" in " ".join(steady.address("a")["notes"]), "the note", also=steady.logs)
    until(lambda: len(steady.holders()) == 1, "one holder", also=steady.logs)
    steady.put(*(node(name, f"192.0.2.{number}") for name, number in numbers.items()))


def test_somebody_else_who_answers_is_found_by_asking(steady):
    foreign = {"192.0.2.201": 24, "2001:db8::201": 64}
    ip_batch(steady.ns(CLIENT), [f"addr add {each}/{size} dev {LINK} nodad" for each, size in foreign.items()])
    steady.put(service("other", *foreign), endpoints("other", "a"))
    try:
        until(lambda: steady.holders("192.0.2.201"), "the holder", also=steady.logs)
        (holder,) = steady.holders("192.0.2.201")
        found = json.loads(run(["ip", "-j", "link", "show", LINK], namespace=steady.ns(CLIENT)))
        for each in foreign:
            until(lambda each=each: steady.address(holder, each)["foreign"], f"who else has {each}", also=steady.logs)
            assert [other["mac"] for other in steady.address(holder, each)["foreign"]] == [found[0]["address"]]
        assert "which no announcer has" in steady.logs()
        assert 'narthex_announcer_foreign_answers_total{ip="192.0.2.201"}' in steady.metrics(holder)
    finally:
        ip_batch(steady.ns(CLIENT), [f"addr del {each}/{size} dev {LINK}" for each, size in foreign.items()])
        steady.put(service("other"))


def test_a_foreign_announcement_is_heard_and_answered(steady):
    holder = the_holder(steady)
    stranger = bytes.fromhex("02dead0000ff")
    with in_namespace(steady.ns(CLIENT)):
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    with sock:
        sock.bind((LINK, 0))
        for frame in l2.gratuitous(VIP, stranger, ""):
            sock.send(frame)
    until(lambda: "02:de:ad:00:00:ff" in [each["mac"] for each in steady.address(holder)["foreign"]], "the report")
    assert "also answered for by MAC address 02:de:ad:00:00:ff" in steady.logs()
    assert steady.ask() == holder


def test_a_dead_node_is_replaced(steady):
    holder = the_holder(steady)
    with RequestStream(steady) as four, RequestStream(steady, VIP_SIX) as six:
        until(
            lambda: all(each.seen and each.seen[-1][1] == holder for each in (four, six)), "answers", also=steady.logs
        )
        dead = time.monotonic()
        steady.kill(holder)
        steady.cut(holder)
        rest = others(steady, holder)
        for stream in (four, six):
            until(lambda: stream.first_answer_after(dead, rest) is not None, "another node", also=steady.logs)  # noqa: B023
            assert stream.first_answer_after(dead, rest) < FAILOVER_LIMIT
    successor = the_holder(steady)
    assert f"node {holder} is lost" in steady.logs()
    assert steady.ask() == steady.ask(VIP_SIX) == successor
    assert steady.state(successor)["failovers"] >= 2
    assert 'narthex_announcer_peers{state="lost"} 1.0' in steady.metrics(successor)


def test_links_that_come_and_go(going):
    holder = the_holder(going)
    inside = going.ns(holder)
    ip_batch(inside, [f"link set {LINK} down"])
    rest = others(going, holder)
    until(lambda: any(going.address(each).get("answers") for each in rest), "another node", also=going.logs)
    until(lambda: not going.state(holder)["links"], "no link", also=going.logs)
    ip_batch(inside, [f"link set {LINK} up"])
    until(lambda: going.state(holder)["links"], "the link", also=going.logs)
    until(lambda: len(going.holders()) == 1, "one holder", also=going.logs)


BLOCK = """
table inet nxblock {
  chain in { type filter hook input priority 0; udp dport 7947 drop; }
  chain out { type filter hook output priority 0; udp dport 7947 drop; }
}
"""


def test_announcers_that_do_not_hear_each_other_and_then_do(going):
    holder = the_holder(going)
    (name, *_) = others(going, holder)
    run(["nft", "-f", "-"], stdin=BLOCK, namespace=going.ns(name))
    until(lambda: set(going.holders()) == {holder, name}, "two holders", also=going.logs)
    # The wire is one, so each hears what the other announces.
    until(lambda: any(going.address(each)["foreign"] for each in (holder, name)), "the report", also=going.logs)
    reports = [other for each in (holder, name) for other in going.address(each)["foreign"]]
    assert {other["node"] for other in reports} <= {holder, name}
    run(["nft", "delete", "table", "inet", "nxblock"], namespace=going.ns(name))
    until(lambda: len(going.holders()) == 1, "one holder", also=going.logs)
    last = the_holder(going)
    until(lambda: {going.ask() for _ in range(3)} == {last}, "one answer", also=going.logs)
    until(lambda: any(going.address(each)["duplicates"] for each in (holder, name)), "duplicates", also=going.logs)


def test_a_process_that_stood_still_does_not_answer_for_what_others_have(going):
    holder = the_holder(going)
    pid = going.processes[holder].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        rest = others(going, holder)
        until(lambda: any(going.address(each).get("answers") for each in rest), "the next", also=going.logs)
        assert going.ask() in rest
        assert f"node {holder} is lost" in going.logs() and ", though its kernel answers" in going.logs()
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: "was suspended for" in going.logs(), "its own report", also=going.logs)
    until(lambda: len(going.holders()) == 1, "one holder", also=going.logs)
    last = the_holder(going)
    until(lambda: going.ask() == last, "one answer")


def test_a_kernel_answers_for_its_closed_ports_and_a_probe_is_no_refusal(tmp_path):
    """A link of its own, without announcers: other tests leave nodes that are cut off."""
    seen = set()
    with EthernetSegment(tmp_path, "nxp") as quiet:
        with in_namespace(quiet.ns(CLIENT)):
            sockets = HeartbeatSockets(7950)

        def asked(address, do):
            do()
            seen.update(sockets.refusals())
            return {probed for where, probed in seen if where == address}

        try:
            for address in ("192.0.2.1", "2001:db8::1"):
                until(lambda: asked(address, lambda: sockets.probe(address)) == {True}, "the answer")  # noqa: B023
                until(lambda: asked(address, lambda: sockets.send(address, b"x")) == {True, False}, "both")  # noqa: B023
            assert list(sockets.received()) == []
        finally:
            sockets.close()


def test_a_planned_end_loses_no_question(going):
    holder = the_holder(going)
    with RequestStream(going, fresh=True) as asked, RequestStream(going, VIP_SIX, fresh=True) as asked_six:
        streams = asked, asked_six
        until(lambda: all(len(each.seen) >= 5 for each in streams), "answers")
        assert going.end(holder) == 0
        counts = [len(each.seen) for each in streams]
        until(lambda: all(len(each.seen) >= count + 20 for each, count in zip(streams, counts, strict=True)), "more")
    for stream in streams:
        names = [name for _, name, _ in stream.seen]
        assert "" not in names, going.logs()
        assert names[0] == holder and names[-1] != holder
