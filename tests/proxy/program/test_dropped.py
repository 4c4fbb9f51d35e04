"""Packets that are dropped as invalid: a sum over a counter that begins anew now and then."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from narthex.model.net import IPFamily
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.program.connections import DroppedPacketCollector
from narthex.testing.fakes import FakeClock

NAME = "kubeproxy_iptables_ct_state_invalid_dropped_packets_total"


def scraped(collector):
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{NAME} ")), None)


@pytest.mark.row("20.18")
def test_both_families_are_one_number_that_only_grows():
    counted = {IPFamily.IPV4: 5, IPFamily.IPV6: 2}
    dropped = DroppedPacketCollector({family: lambda family=family: counted[family] for family in counted}, FakeClock())
    assert scraped(dropped) == 7
    counted[IPFamily.IPV4] = 6
    assert scraped(dropped) == 8
    counted[IPFamily.IPV6] = 1
    assert scraped(dropped) == 9, "the rule was made anew"


def test_where_there_is_no_such_rule_there_is_no_number():
    assert scraped(DroppedPacketCollector({}, FakeClock())) is None


def test_reading_is_a_small_part_of_the_time_and_may_fail(caplog):
    clock, answers = FakeClock(), [3, ApplyError("no"), ApplyError("no"), 4]

    def read():
        clock.advance(0.1)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    dropped = DroppedPacketCollector({IPFamily.IPV4: read}, clock)
    assert scraped(dropped) == scraped(dropped) == 3
    assert len(answers) == 3
    clock.advance(3)
    assert scraped(dropped) == scraped(dropped) == 3
    assert caplog.text.count("dropped packets are not counted for now: no") == 1
    assert scraped(dropped) == 4
