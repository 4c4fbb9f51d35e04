"""What a mode cannot serve is said once, and once more when it is over."""

import logging

from narthex.model.net import IPFamily, Protocol
from narthex.model.objects import EndpointPort, ServicePort
from narthex.proxy.backends.userspace.backend import UserspaceBackend
from narthex.proxy.program.report import UnservedReporter
from narthex.proxy.program.sync import SyncResult
from narthex.testing.build import endpoint, endpoint_slice, plan, service

FOUR = IPFamily.IPV4


def sctp():
    return (
        service("shop/gtp", "10.110.0.5", ports=(ServicePort(name="assoc", protocol=Protocol.SCTP, port=80),)),
        endpoint_slice(
            "shop/gtp", endpoint("10.64.1.10"), ports=(EndpointPort(name="assoc", protocol=Protocol.SCTP, port=80),)
        ),
    )


def test_sctp_is_reported_and_so_is_its_end(caplog):
    rules = [{}]
    unserved = UnservedReporter(lambda _: rules[0])
    caplog.set_level(logging.INFO, "narthex")
    for objects in (sctp(), sctp(), ()):
        made = plan(*objects)
        rules[0] = UserspaceBackend().render(made).unserved
        unserved.after(SyncResult(family=FOUR, plan=made, first=False, seconds={}))
    assert caplog.messages == [
        "Service port shop/gtp:assoc (SCTP, IPv4) is refused: mode userspace does not carry SCTP; another mode does",
        "Service port shop/gtp:assoc (SCTP, IPv4) is not refused any more",
    ]


def test_who_got_no_port_is_told_what_to_do():
    objects = [
        each
        for name in ("a", "b")
        for each in (
            service(f"shop/{name}", f"10.110.0.{ord(name)}"),
            endpoint_slice(f"shop/{name}", endpoint("10.64.1.10")),
        )
    ]
    ((name, reason),) = UserspaceBackend((7000, 7000)).render(plan(*objects)).unserved.items()
    assert str(name) == "shop/b:http"
    assert reason == "all 1 ports of the relay are taken; give it more with portRange"
    assert UserspaceBackend((7000, 7001)).render(plan(*objects)).unserved == {}


def test_a_service_without_endpoints_is_not_reported():
    only_service, _ = sctp()
    assert UserspaceBackend().render(plan(only_service)).unserved == {}
