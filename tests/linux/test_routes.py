"""Reading the kernel's answers about routes."""

import pytest

from narthex.lab.program.trace import RouteHop, next_hop, read_answer


def test_next_router() -> None:
    answer = '[{"dst":"10.244.2.5","gateway":"192.168.49.12","dev":"eth0","prefsrc":"192.168.49.11","flags":[]}]'
    assert read_answer(answer) == RouteHop(device="eth0", via="192.168.49.12")


def test_router_of_the_other_family() -> None:
    answer = '[{"dst":"10.244.2.5","via":{"family":"inet6","host":"fe80::1"},"dev":"eth0","flags":[]}]'
    assert read_answer(answer) == RouteHop(device="eth0", via="fe80::1")


def test_on_the_link() -> None:
    answer = '[{"dst":"10.244.1.5","dev":"cni0","prefsrc":"10.244.1.1","flags":[],"uid":0,"cache":[]}]'
    assert read_answer(answer) == RouteHop(device="cni0")


def test_own_address() -> None:
    answer = '[{"type":"local","dst":"127.0.0.1","dev":"lo","prefsrc":"127.0.0.1","flags":[],"cache":["local"]}]'
    assert read_answer(answer) == RouteHop(device="lo", local=True)


def test_unreachable() -> None:
    assert read_answer('[{"type":"unreachable","dst":"10.9.9.9","dev":"lo"}]') == RouteHop(problem="unreachable")


@pytest.mark.parametrize("text", ["", "-h", "10.0.0.1/8", "10.0.0.01", "default"])
def test_nothing_but_an_address_reaches_the_program(text: str) -> None:
    with pytest.raises(ValueError):
        next_hop(text)
