"""Changes that a proof refuses are not written: the rules before stay in force, and other Services go on."""

import logging

import msgspec
import pytest

from narthex.model import IPFamily, NamespacedName
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.balancing import LOAD_BALANCING
from narthex.proxy.plan.ir import Endpoint, Lineage
from narthex.proxy.plan.planner import Planner
from narthex.proxy.program.loop import Proxy
from narthex.proxy.program.metrics import ProxyMetrics
from narthex.proxy.program.schedule import SyncPeriods
from narthex.proxy.program.sync import FamilySync
from narthex.testing.build import CONFIG, HOST, NODE, endpoint, endpoint_slice, node, plan, service
from narthex.testing.fakes import FakeClock, FakeInbox, FakeTarget
from narthex.trace.proof.incremental import IncrementalProof

MODES = ("nftables", "iptables")
V4 = IPFamily.IPV4


class WrongBackend:
    """A backend that sends connections for some Services elsewhere."""

    def __init__(self, mode):
        self._right = BACKENDS[mode]
        self.wrong = lambda _plan, _name: False
        """Says for which Service ports of a plan the rules are wrong."""

    def __getattr__(self, name):
        return getattr(self._right, name)

    def advance(self, previous, plan):
        services = {
            name: self._spoiled(one) if self.wrong(plan, name.service.name) else one
            for name, one in plan.services.items()
        }
        if any(one is not plan.services[name] for name, one in services.items()):
            plan = msgspec.structs.replace(plan, services=services, lineage=Lineage())
        return self._right.advance(previous, plan)

    @staticmethod
    def _spoiled(one):
        if one.cluster is None:
            return one
        first, *others = one.cluster.endpoints
        ends = (Endpoint(first.address, first.port + 1, first.local), *others)
        return msgspec.structs.replace(one, cluster=msgspec.structs.replace(one.cluster, endpoints=ends))


class Node:
    """A node whose proxy proves what it writes."""

    def __init__(self, mode, *objects, rules=None):
        self.mode, self.clock, self.inbox = mode, FakeClock(), FakeInbox(node(), *objects)
        self.backend, self.events = WrongBackend(mode), []
        self.target = FakeTarget(BACKENDS[mode], BACKENDS[mode].render(plan()), rules)
        proof = IncrementalProof(self.backend, lambda: HOST)
        sync = FamilySync(V4, Planner(CONFIG, V4), self.backend, self.target, self.clock, verifier=proof)
        self.proxy = Proxy(
            self.inbox, [sync], self.clock, SyncPeriods(), node_name=NODE,
            metrics=ProxyMetrics(mode, verifies=True), record=self.events.append,
        )  # fmt: skip

    def change(self, *objects):
        self.inbox.put(*objects)
        self.proxy.turn()

    @property
    def text(self):
        return self.backend.text(self.target.rules) if self.target.rules is not None else ""

    def metric(self, name):
        lines = self.proxy.metrics.exposition().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def shop(name, number, *pods):
    ends = (endpoint(f"10.64.1.{pod}") for pod in pods)
    return service(f"shop/{name}", f"10.110.0.{number}"), endpoint_slice(f"shop/{name}", *ends)


def addresses(plan):
    return {end.address for one in plan.services.values() if one.cluster for end in one.cluster.endpoints}


WEB, CART = shop("web", 1, 10, 11), shop("cart", 2, 20)


@pytest.fixture(params=MODES)
def made(request):
    """A node that serves two Services."""
    made = Node(request.param, *WEB, *CART)
    made.proxy.turn()
    assert "10.64.1.11" in made.text and "10.64.1.20" in made.text
    return made


def errors(log):
    return [record.getMessage() for record in log.records if record.levelno == logging.ERROR]


def test_a_service_whose_rules_would_be_wrong_keeps_its_earlier_ones(made, log):
    made.backend.wrong = lambda plan, name: name == "web" and "10.64.1.12" in addresses(plan)
    made.change(*shop("web", 1, 10, 11, 12), *shop("cart", 2, 21))
    assert "10.64.1.12" not in made.text and "10.64.1.11" in made.text
    assert "10.64.1.21" in made.text and "10.64.1.20" not in made.text
    (said,) = errors(log)
    assert "shop/web:http" in said and "10.110.0.1:80" in said and "10.64.1.10:81" in said, said
    assert [(each.object, each.reason) for each in made.events] == [(NamespacedName("shop", "web"), "ChangesRefused")]
    assert made.metric("narthex_refused_changes_total") == 1 and made.metric("narthex_refused_service_ports") == 1
    status, body = made.proxy.health.healthz()
    assert status == 200 and body["status"]["IPv4"]["refused"] == 1
    made.change(*shop("cart", 2, 22))
    assert "10.64.1.22" in made.text and len(errors(log)) == 1, "it is said once"
    made.backend.wrong = lambda _plan, _name: False
    made.change(*shop("cart", 2, 23))
    assert "10.64.1.12" in made.text and "10.64.1.23" in made.text
    assert made.metric("narthex_refused_service_ports") == 0
    assert "no IPv4 change is refused any more" in log.text


def test_if_all_changes_would_be_wrong_the_rules_before_stay(made, log):
    before, made.backend.wrong = made.text, lambda _plan, _name: True
    made.change(*shop("more", 3, 30))
    assert made.text == before and len(made.target.applied) == 1
    assert "no change is written" in errors(log)[0]
    assert [(each.kind, each.reason) for each in made.events] == [("Node", "ChangesRefused")]
    made.clock.advance(600)
    made.proxy.turn()
    assert made.proxy.health.healthz()[0] == 503, "changes are pending for too long"
    assert made.proxy.health.livez()[0] == 200, "a new process would refuse them as well"
    assert len(errors(log)) == 1
    made.backend.wrong = lambda _plan, _name: False
    made.change(*shop("more", 3, 31))
    assert "10.64.1.31" in made.text and made.proxy.health.healthz()[0] == 200


def test_a_service_whose_change_harms_another_one_is_held_back(made, log):
    spoils = "10.64.1.31"

    made.change(*shop("third", 3, 30))
    made.backend.wrong = lambda plan, name: name == "web" and spoils in addresses(plan)
    made.change(*shop("third", 3, 31), *shop("cart", 2, 21))
    assert spoils not in made.text and "10.64.1.30" in made.text
    assert "10.64.1.21" in made.text, "the other Service is up to date"
    assert "shop/third:http" in errors(log)[0]


def test_rules_that_others_damaged_are_repaired_while_changes_are_refused(made):
    before, in_force = made.target.rules, made.proxy.plans[0]
    made.backend.wrong = lambda plan, _name: plan is not in_force
    made.change(*shop("more", 3, 30))
    made.target.rules = BACKENDS[made.mode].render(plan(*CART))
    made.clock.advance(600)
    made.proxy.turn()
    assert made.target.rules == before


@pytest.mark.parametrize("mode", MODES)
def test_a_new_process_keeps_rules_that_it_can_only_replace_by_wrong_ones(mode):
    earlier = BACKENDS[mode].render(plan(*WEB, *CART))
    made = Node(mode, *WEB, *CART, rules=earlier)
    made.backend.wrong = lambda _plan, name: name == "web"
    made.proxy.turn()
    assert made.target.rules == earlier and not made.target.applied
    assert made.proxy.health.healthz()[0] == 503


@pytest.mark.parametrize("mode", MODES)
def test_a_new_node_serves_all_services_but_the_wrong_one(mode):
    made = Node(mode, *WEB, *CART)
    made.backend.wrong = lambda _plan, name: name == "web"
    made.proxy.turn()
    assert "10.64.1.20" in made.text and "10.64.1.10" not in made.text


def test_a_failed_write_and_a_reading_need_no_new_proof_of_the_whole(made):
    made.target.failures.append("no")
    made.change(*shop("cart", 2, 21))
    made.clock.advance(5)
    made.proxy.turn()
    assert "10.64.1.21" in made.text and not made.events


def test_what_a_hash_selects_is_written_and_reported_once(log):
    made = Node("nftables", *WEB)
    made.proxy.turn()
    hashing = msgspec.structs.replace(WEB[0], annotations=((LOAD_BALANCING, "maglev"),))
    made.change(hashing)
    made.change(*CART)
    said = [text for text in log.messages if "without a proof" in text]
    assert len(said) == 1 and "shop/web:http" in said[0]
    assert made.metric("narthex_undecided_service_ports") == 1 and not made.events


def test_a_repair_may_only_write_what_was_proved(made):
    sync = made.proxy._halves[0].sync
    rules, proof = sync.rules, sync.verifier
    right = BACKENDS[made.mode].diff(BACKENDS[made.mode].render(plan(*CART)), rules)
    wrong = BACKENDS[made.mode].diff(rules, BACKENDS[made.mode].render(plan(*CART)))
    assert proof.restores(rules, right) and not proof.restores(rules, wrong)
