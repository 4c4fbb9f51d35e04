"""What the log says of changes."""

from narthex.proxy.backends import BACKENDS
from narthex.proxy.program.report import written
from narthex.testing.build import endpoint, endpoint_slice, plan, service
from narthex.testing.fakes import FakeChanges

EMPTY = plan()
ONE = plan(service("shop/web", "10.110.0.1"), endpoint_slice("shop/web", endpoint("10.64.1.5")))
TWO = plan(service("shop/web", "10.110.0.1"), endpoint_slice("shop/web", endpoint("10.64.1.5"), endpoint("10.64.1.6")))


def words(mode, have, want):
    backend = BACKENDS[mode]
    held = None if have is None else backend.render(have)
    return written(backend.advance(held, want)[1])


def test_a_first_sync_writes_everything():
    assert words("nftables", None, ONE).startswith("everything anew: ")
    assert "chains" in words("iptables", None, ONE)


def test_a_change_is_counted_in_the_modes_own_units():
    assert words("nftables", ONE, TWO).startswith("wrote ")
    assert "element" in words("nftables", ONE, TWO)
    assert "rule" in words("iptables", ONE, TWO)
    assert "removed" in words("iptables", TWO, EMPTY)
    assert words("ipvs", ONE, TWO).startswith("wrote 1 real server")
    assert "2 virtual servers" not in words("ipvs", TWO, EMPTY) and "1 virtual server" in words("ipvs", TWO, EMPTY)
    assert "set entries" in words("ipvs", None, ONE)
    assert "listener" in words("userspace", ONE, TWO)


def test_nothing_is_nothing():
    for mode in BACKENDS:
        assert words(mode, ONE, ONE) == ""


def test_changes_of_another_kind_have_no_numbers():
    assert written(FakeChanges(reset=True)) == ""
