"""Which parts a node has, and what each is made of; the parts are stand-ins that do nothing."""

import threading

import msgspec
import pytest

from narthex.cli.node import PARTS as FLAGS
from narthex.kube.source import Origin
from narthex.model.backoff import Backoff
from narthex.node import process as table
from narthex.node.parts import NodePart
from narthex.node.process import NodeProgram
from narthex.proxy.program.settings import settings
from narthex.runtime.process import StartError
from narthex.testing.load import until

TOLD = settings({"clusterCIDR": "10.64.0.0/12"}, None, "worker-a")


class Source:
    problems = ()


class StandIn:
    """A proxy that notes what it is given."""

    made = []
    healthy = True

    def __init__(self, told, origin, status, verifiers):
        self.told, self.origin, self.status, self.verifiers = [told], origin, status, verifiers
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
    monkeypatch.setattr(table, "ProxyPart", StandIn)
    monkeypatch.setattr("narthex.node.parts.RESTART_BACKOFF", Backoff(0.01, 60.0))
    monkeypatch.setattr(StandIn, "made", [])
    made = NodeProgram(TOLD, lambda: Origin(Source(), collectors=("the source's",)))
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
    with pytest.raises(StartError, match="every part is switched off"):
        NodeProgram(of_parts(proxy=False), lambda: Origin(Source()))


class Renewed:
    """A part that cannot be told anything."""

    healthy = True

    def __init__(self, made_of):
        self.made_of = made_of
        self.over = threading.Event()

    def run(self):
        assert self.over.wait(60)

    def stop(self):
        self.over.set()

    def collect(self):
        return (f"numbers of {self.made_of}",)


def test_a_part_that_cannot_be_told_is_made_anew_for_what_concerns_it_alone(monkeypatch):
    made = []

    def make(given):
        made.append(Renewed(given.settings.own.cni.socket))
        return made[-1]

    monkeypatch.setattr(table, "ProxyPart", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setitem(table.PARTS, "cni", table.PartDefinition(make, lambda told: told.own.cni))
    told = of_parts(proxy=True, cni=True)
    work = NodeProgram(told, lambda: Origin(Source()))
    thread = threading.Thread(target=work.run)
    thread.start()
    try:
        until(lambda: all(report.running for report in work.report().values()), "both parts")
        assert list(work.report()) == ["proxy", "cni"]
        work.take_over(msgspec.structs.replace(told, oom_score_adj=-5))
        other = msgspec.structs.replace(told.own.cni, socket="/run/other.sock")
        fresh = msgspec.structs.replace(told, own=msgspec.structs.replace(told.own, cni=other))
        work.take_over(fresh)
        until(lambda: len(made) == 2 and work.report()["cni"].running, "the other part")
        assert [part.made_of for part in made] == [told.own.cni.socket, "/run/other.sock"]
        assert work.report()["cni"].failures == 0
        (proxy,) = StandIn.made
        assert proxy.told[-1] == fresh
        assert "numbers of /run/other.sock" in proxy.origin.collectors[-1].collect()
    finally:
        work.stop()
        thread.join(60)
        work.status.stop()
    assert not thread.is_alive()


def of_parts(**parts):
    own = msgspec.structs.replace(TOLD.own, parts=msgspec.structs.replace(TOLD.own.parts, **parts))
    return msgspec.structs.replace(TOLD, own=own)


def test_each_part_is_in_the_settings_the_table_and_the_flags():
    names = list(msgspec.structs.asdict(TOLD.own.parts))
    assert names == list(table.PARTS) == list(FLAGS)


def test_the_plugins_agent_is_a_part(tmp_path):
    told = of_parts(proxy=False, cni=True)
    cni = msgspec.structs.replace(told.own.cni, socket=str(tmp_path / "sock"), state_directory=str(tmp_path / "state"))
    told = msgspec.structs.replace(told, own=msgspec.structs.replace(told.own, cni=cni))
    given = table.PartInputs(told, lambda: Origin(Source()), None, None)
    (entry,) = table.switched_on(told).values()
    part: NodePart = entry.make(given)
    running = threading.Thread(target=part.run)
    running.start()
    try:
        until(lambda: part.healthy, "the agent")
        assert (tmp_path / "sock").exists()
    finally:
        part.stop()
        running.join(60)
    assert not running.is_alive() and not (tmp_path / "sock").exists()
