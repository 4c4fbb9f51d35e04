"""What the observer of connections reports, as the interpreter runs it."""

import struct
from itertools import product
from socket import AF_INET, AF_INET6, inet_pton

import pytest

from narthex.bpf import Environment, Helper, MapModel, assemble, run_program
from narthex.model import IPFamily
from narthex.proxy.backends.sockets.layout import WATCHED, Capacity, WatchFlag, family_maps
from narthex.proxy.backends.sockets.observers import (
    CALLBACK_FLAGS,
    FAMILY,
    FIRST_ARGUMENT,
    MOST_REPORTED,
    OBSERVER_CONTEXT_SIZE,
    OPERATION,
    REMOTE_IP4,
    REMOTE_IP6,
    REMOTE_PORT,
    RING,
    SECOND_ARGUMENT,
    SEGMENTS_IN,
    STATE,
    TOTAL_RETRANSMITS,
    ObservedOperation,
    observation_of,
    observer_program,
)
from narthex.proxy.plan.ejection import ConnectEvent, ConnectObservation

ADDRESS = {IPFamily.IPV4: "10.64.1.5", IPFamily.IPV6: "fd64::5"}
PORT = 8080
OTHER_FLAG = 1 << 6
"""A callback that another program of the cgroup has asked for."""
each_family = pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)


class Observed:
    """A socket that a connect program sent to an endpoint, and the maps."""

    def __init__(self, family, *, mapped=False):
        self.family, self.mapped = family, mapped
        layouts = {each: family_maps(each, Capacity(services=8, frontends=8, slots=8, sockets=8)) for each in IPFamily}
        self.maps = {spec.name: MapModel(spec) for layout in layouts.values() for spec in layout.all}
        self.maps[RING.name] = MapModel(RING)
        self.code = assemble(observer_program(layouts).statements, {name: at for at, name in enumerate(self.maps)})
        self.packed = inet_pton(AF_INET if family is IPFamily.IPV4 else AF_INET6, ADDRESS[family])
        self.place = self.packed + struct.pack(">HH", PORT, 0)
        self.watched = self.maps[layouts[family].watched.name]
        self.peers = self.maps[layouts[family].peers.name]
        self.peers.update(struct.pack("=I", 7), struct.pack("=Q", 7) + self.place + bytes(layouts[family].place_size))
        self.flags = 0

    def run(self, operation, *, first=0, second=0, state=2, retransmits=0, segments=0):
        """Run the program; return what it reported."""
        context = bytearray(OBSERVER_CONTEXT_SIZE)
        words = {OPERATION: operation, FIRST_ARGUMENT: first, SECOND_ARGUMENT: second, STATE: state}
        words |= {TOTAL_RETRANSMITS: retransmits, SEGMENTS_IN: segments, CALLBACK_FLAGS: OTHER_FLAG}
        words[FAMILY] = AF_INET if self.family is IPFamily.IPV4 and not self.mapped else AF_INET6
        # The kernel has the port in network order in the upper half.
        words[REMOTE_PORT] = int.from_bytes(struct.pack(">H", PORT), "little") << 16
        for offset, value in words.items():
            struct.pack_into("=I", context, offset, value)
        if self.family is IPFamily.IPV4:
            context[REMOTE_IP4 : REMOTE_IP4 + 4] = self.packed
            if self.mapped:
                context[REMOTE_IP6 : REMOTE_IP6 + 16] = bytes(10) + b"\xff\xff" + self.packed
        else:
            context[REMOTE_IP6 : REMOTE_IP6 + 16] = self.packed

        def set_flags(_, flags, *__):
            self.flags = flags
            return 0

        environment = Environment(
            netns_cookie=42, socket_cookie=7, now_ns=1_500_000_000, messages=[], other_helpers={Helper.SOCK_OPS_CB_FLAGS: set_flags}
        )  # fmt: skip
        assert run_program(self.code, context, list(self.maps.values()), environment) == 1
        return [observation_of(message) for message in environment.messages]

    def seen(self, event):
        return [(self.family, ConnectObservation(1.5, (ADDRESS[self.family], PORT), "netns 42", event))]

    def watch(self, failures=0, flags=0):
        self.watched.update(self.place, WATCHED.pack(failures, flags))

    @property
    def state(self):
        value = self.watched.find(self.place)
        return WATCHED.unpack(value) if value is not None else None


CASES = [(IPFamily.IPV4, False), (IPFamily.IPV4, True), (IPFamily.IPV6, False)]


@pytest.fixture(params=CASES, ids=["IPv4", "IPv4-mapped", "IPv6"])
def observed(request):
    family, mapped = request.param
    return Observed(family, mapped=mapped)


def test_without_failures_nothing_is_reported(observed):
    assert observed.run(ObservedOperation.CONNECT) == [] and observed.run(ObservedOperation.ESTABLISHED) == []
    assert observed.state is None
    assert observed.flags == OTHER_FLAG | 1 | 4, "what other programs asked for stays"


def test_a_timeout_is_reported_once_and_the_endpoint_watched(observed):
    assert observed.run(ObservedOperation.RETRANSMIT_TIMEOUT) == observed.seen(ConnectEvent.FAILED)
    assert observed.state == (1, 0)
    assert observed.run(ObservedOperation.RETRANSMIT_TIMEOUT, first=1) == []
    assert observed.run(ObservedOperation.RETRANSMIT_TIMEOUT, state=1) == [], "an established connection"
    assert observed.run(ObservedOperation.STATE_CHANGE, first=2, second=7, segments=1, retransmits=1) == []


def test_a_refusal_is_a_reset_before_the_connection_is_made(observed):
    assert observed.run(ObservedOperation.STATE_CHANGE, first=2, second=7, segments=1) == observed.seen(
        ConnectEvent.FAILED
    )
    for first, second, segments in ((2, 1, 1), (1, 7, 1), (2, 7, 0)):
        assert observed.run(ObservedOperation.STATE_CHANGE, first=first, second=second, segments=segments) == []


def test_a_connection_ends_the_watch(observed):
    observed.watch(failures=3)
    assert observed.run(ObservedOperation.ESTABLISHED) == observed.seen(ConnectEvent.CONNECTED)
    assert observed.state is None and observed.run(ObservedOperation.ESTABLISHED) == []


def test_the_start_of_a_trial_is_reported_once(observed):
    observed.watch(flags=WatchFlag.EJECTED)
    assert observed.run(ObservedOperation.CONNECT) == []
    observed.watch(flags=WatchFlag.EJECTED | WatchFlag.ON_TRIAL)
    assert observed.run(ObservedOperation.CONNECT) == observed.seen(ConnectEvent.STARTED)
    assert observed.state == (0, WatchFlag.EJECTED) and observed.run(ObservedOperation.CONNECT) == []


def test_failures_that_nobody_takes_in_are_limited(observed):
    reported = sum(len(observed.run(ObservedOperation.RETRANSMIT_TIMEOUT)) for _ in range(2 * MOST_REPORTED))
    assert reported == MOST_REPORTED
    observed.watch()
    assert len(observed.run(ObservedOperation.RETRANSMIT_TIMEOUT)) == 1


@pytest.mark.parametrize("other_socket", [True, False])
def test_sockets_that_no_program_sent_are_not_reported(observed, other_socket):
    observed.watch(flags=WatchFlag.ON_TRIAL)
    held = observed.peers.find(struct.pack("=I", 7))
    # Another socket took the place, or this one is connected to another endpoint.
    held[0 if other_socket else 9] ^= 1
    found = [
        observed.run(operation, first=first, second=7, segments=1)
        for operation, first in product(ObservedOperation, (0, 2))
    ]
    assert not any(found) and observed.flags == 0


@each_family
def test_other_calls_and_families_are_passed_over(family):
    observed = Observed(family)
    assert all(observed.run(operation) == [] for operation in range(20) if operation not in {3, 4, 8, 10})
