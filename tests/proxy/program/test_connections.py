"""New connections: sums over counters that come and go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from narthex.model.net import IPFamily
from narthex.proxy.backends.base import ApplyError
from narthex.proxy.backends.counters import ConnectionCount
from narthex.proxy.program.connections import READ_SHARE, ConnectionCollector
from narthex.runtime.configuration.values import OwnConfiguration
from narthex.testing.build import endpoint, endpoint_slice, plan, port_name, service
from narthex.testing.fakes import FakeClock

FOUR = IPFamily.IPV4
WEB, CART = port_name("shop/web:http"), port_name("shop/cart:http")
ONE, TWO = ("10.64.1.5", 8080), ("10.64.1.6", 8080)


class Kernel:
    """Counters, and how long it takes to read them."""

    def __init__(self, told=None):
        self.clock = FakeClock()
        ends = endpoint_slice("shop/web", endpoint("10.64.1.5"), endpoint("10.64.1.6"), port=8080)
        objects = (service("shop/web", "10.110.0.1"), service("shop/cart", "10.110.0.2"), ends)
        self.plans = [plan(*objects), plan(*objects, family=IPFamily.IPV6)]
        self.counters = {}
        self.seconds = 0.0
        self.reads = 0
        self.error = None
        self.connections = ConnectionCollector(
            {FOUR: self.read}, lambda: self.plans, self.clock, told or OwnConfiguration()
        )

    def read(self, made, endpoints):
        assert made.family is FOUR
        self.asked_for_endpoints = endpoints
        self.reads += 1
        self.clock.advance(self.seconds)
        if self.error:
            raise ApplyError(self.error)
        return [ConnectionCount(key, *value) for key, value in self.counters.items()]

    def set(self, key, name, endpoint, number):
        self.counters[key] = name, endpoint, number

    def scrape(self):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self.connections)
        found = {}
        for family in text_string_to_metric_families(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = sample.labels
                where = (labels.get("service"), labels.get("endpoint")) if "service" in labels else None
                found[sample.name, where] = sample.value
        return {key: value for key, value in found.items() if not key[0].endswith("_created")}

    def services(self):
        return {where[0]: value for (name, where), value in self.scrape().items() if name == TOTAL}

    def endpoints(self):
        return {where[1]: value for (name, where), value in self.scrape().items() if name == EACH}


TOTAL = "narthex_service_new_connections_total"
EACH = "narthex_endpoint_new_connections_total"
LEFT_OUT = "narthex_connection_series_left_out", None


def test_what_an_earlier_process_counted_is_no_news():
    kernel = Kernel()
    kernel.set("a", WEB, None, 1000)
    kernel.connections.look()
    kernel.set("a", WEB, None, 1003)
    kernel.set("b", CART, None, 5)
    assert kernel.services() == {"web": 3, "cart": 5}


def test_counters_that_begin_anew_add_up():
    kernel = Kernel()
    kernel.connections.look()
    for number in (7, 2, 2, 9):
        kernel.set("a", WEB, None, number)
        total = kernel.services()["web"]
    assert total == 7 + 2 + 0 + 7


def test_several_counters_of_one_service_port_are_one_number():
    kernel = Kernel()
    kernel.connections.look()
    kernel.set("cluster IP", WEB, None, 2)
    kernel.set("node port", WEB, None, 3)
    kernel.set(("cluster IP", 0), WEB, ONE, 2)
    kernel.set(("node port", 0), WEB, ONE, 1)
    kernel.set(("node port", 1), WEB, TWO, 2)
    assert kernel.services() == {"web": 5}
    assert kernel.endpoints() == {"10.64.1.5:8080": 3, "10.64.1.6:8080": 2}


def test_an_endpoint_that_moves_to_another_slot_keeps_its_sum():
    kernel = Kernel()
    kernel.connections.look()
    kernel.set(("slot 1", TWO), WEB, TWO, 4)
    assert kernel.endpoints() == {"10.64.1.6:8080": 4}
    kernel.counters.clear()
    kernel.set(("slot 0", TWO), WEB, TWO, 1)
    assert kernel.endpoints() == {"10.64.1.6:8080": 5}


def test_what_is_gone_is_not_shown_any_more():
    kernel = Kernel()
    kernel.connections.look()
    kernel.set("a", WEB, None, 4)
    kernel.services()
    kernel.counters.clear()
    assert kernel.services() == {}


def test_reading_is_a_small_part_of_the_time():
    kernel = Kernel()
    kernel.seconds = 0.5
    kernel.connections.look()
    kernel.set("a", WEB, None, 4)
    assert kernel.services() == {}
    kernel.clock.advance(READ_SHARE * 0.5 - 0.1)
    kernel.scrape()
    assert kernel.reads == 1
    kernel.clock.advance(0.2)
    assert kernel.services() == {"web": 4}
    assert kernel.reads == 2


def test_a_reading_that_fails_is_said_once_and_changes_nothing(caplog):
    kernel = Kernel()
    kernel.connections.look()
    kernel.set("a", WEB, None, 4)
    assert kernel.services() == {"web": 4}
    kernel.error = "no"
    assert kernel.services() == kernel.services() == {"web": 4}
    assert caplog.text.count("new connections are not counted for now: no") == 1
    kernel.error = None
    kernel.set("a", WEB, None, 6)
    assert kernel.services() == {"web": 6}


@pytest.mark.parametrize(
    ("told", "services", "endpoints", "left_out"),
    [
        (OwnConfiguration(connection_series=4), 2, 2, 0),
        (OwnConfiguration(connection_series=3), 2, 0, 2),
        (OwnConfiguration(connection_series=1), 1, 0, 3),
        (OwnConfiguration(connection_series=0), 0, 0, 4),
        (OwnConfiguration(connection_metrics="services"), 2, 0, 0),
    ],
)
def test_there_are_at_most_so_many_numbers(told, services, endpoints, left_out):
    kernel = Kernel(told)
    for name in (WEB, CART):
        kernel.set(name, name, None, 1)
    for end in (ONE, TWO):
        kernel.set((WEB, end), WEB, end, 1)
    found = kernel.scrape()
    assert kernel.asked_for_endpoints is (endpoints > 0), "what is not shown is not read"
    assert sum(name == TOTAL for name, _ in found) == services
    assert sum(name == EACH for name, _ in found) == endpoints
    assert found[LEFT_OUT] == left_out


def test_endpoints_that_are_asked_for_later_begin_at_nothing():
    kernel = Kernel(OwnConfiguration(connection_metrics="services"))
    kernel.set("a", WEB, None, 7)
    kernel.set("b", WEB, ONE, 7)
    kernel.connections.look()
    kernel.connections.configuration = OwnConfiguration()
    assert kernel.endpoints() == {"10.64.1.5:8080": 0}
    kernel.set("b", WEB, ONE, 9)
    kernel.set("c", WEB, TWO, 1)
    assert kernel.endpoints() == {"10.64.1.5:8080": 2, "10.64.1.6:8080": 1}


def test_nothing_is_read_when_they_are_switched_off():
    kernel = Kernel(OwnConfiguration(connection_metrics="off"))
    assert kernel.scrape() == {}
    assert kernel.reads == 0
    kernel.connections.configuration = OwnConfiguration()
    kernel.set("a", WEB, None, 1)
    assert kernel.services() == {"web": 0}


@given(st.lists(st.one_of(st.integers(0, 9), st.just("new")), max_size=30), st.data())
def test_nothing_is_counted_twice_and_nothing_is_lost_while_a_counter_stays(steps, data):
    """Connections come, now and then somebody looks, now and then the counter is made anew right after a look."""
    kernel = Kernel()
    kernel.connections.look()
    number, happened = 0, 0
    for step in steps:
        if step == "new":
            kernel.connections.look()
            number = 0
            kernel.set(("made", happened, len(kernel.counters)), WEB, None, 0)
            kernel.counters = dict(list(kernel.counters.items())[-1:])
        elif kernel.counters:
            number += step
            happened += step
            (key,) = kernel.counters
            kernel.set(key, WEB, None, number)
        if data.draw(st.booleans()):
            kernel.connections.look()
    if kernel.counters:
        assert kernel.services() == {"web": happened}
