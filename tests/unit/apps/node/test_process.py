"""Which parts a node has, and what each is made of; the parts are stand-ins that do nothing."""

import threading

import msgspec
import pytest

from narthex.apps.node import process as node_process
from narthex.apps.node.process import NodeWork
from narthex.apps.proxy.settings import settings
from narthex.apps.proxy.start import Origin, StartError
from narthex.testing.load import until

TOLD = settings({"clusterCIDR": "10.64.0.0/12"}, None, "worker-a")


class Source:
    problems = ()


class StandIn:
    """A proxy that notes what it is given."""

    made = []
    healthy = True

    def __init__(self, told, origin, status):
        self.told, self.origin, self.status = [told], origin, status
        self.over = threading.Event()
        self.fault = None
        StandIn.made.append(self)

    def run(self):
        assert self.over.wait(60)
        if self.fault:
            raise self.fault

    def stop(self):
        self.over.set()

    def take_over(self, fresh):
        self.told.append(fresh)


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setattr(node_process, "ProxyPart", StandIn)
    monkeypatch.setattr("narthex.apps.node.parts.FIRST_REST", 0.01)
    monkeypatch.setattr(StandIn, "made", [])
    made = NodeWork(TOLD, lambda: Origin(Source(), collectors=("the source's",)))
    thread = threading.Thread(target=made.run)
    thread.start()
    until(lambda: StandIn.made, "the proxy")
    yield made
    made.stop()
    thread.join(60)
    assert not thread.is_alive()
    made.status.stop()


def test_a_part_that_failed_is_made_anew_of_the_settings_in_force(work):
    (first,) = StandIn.made
    fresh = msgspec.structs.replace(TOLD, oom_score_adj=-5)
    work.take_over(fresh)
    assert first.told == [TOLD, fresh]
    first.fault = OSError("gone")
    first.stop()
    until(lambda: len(StandIn.made) == 2, "the second run")
    second = StandIn.made[1]
    assert second.told == [fresh]
    # What the first source has told already, the second one must tell again.
    assert second.origin.source is not first.origin.source
    assert second.status is first.status is work.status
    work.take_over(TOLD)
    assert (first.told, second.told) == ([TOLD, fresh], [fresh, TOLD])


@pytest.mark.usefixtures("work")
def test_a_scrape_shows_the_sources_numbers_and_the_nodes():
    collectors = StandIn.made[0].origin.collectors
    assert collectors[0] == "the source's"
    names = [metric.name for metric in collectors[1].collect()]
    assert names == ["narthex_part_running", "narthex_part_healthy", "narthex_part_failures"]


def test_without_parts_there_is_nothing_to_do():
    own = msgspec.structs.replace(TOLD.own, parts=msgspec.structs.replace(TOLD.own.parts, proxy=False))
    with pytest.raises(StartError, match="every part is switched off"):
        NodeWork(msgspec.structs.replace(TOLD, own=own), lambda: Origin(Source()))
