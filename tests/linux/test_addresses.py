"""What the kernel says of its own addresses; every machine has at least loopback."""

import pytest

from narthex.linux import addresses
from narthex.linux.addresses import OwnAddress, own_addresses, primary_address, usable_families
from narthex.model.net import FAMILIES, IPFamily


def test_loopback_is_among_them_and_not_global():
    found = {own.address: own for own in own_addresses()}
    assert found["127.0.0.1"].prefix == 8
    assert found["127.0.0.1"].family is IPFamily.IPV4
    assert not found["127.0.0.1"].is_global


def test_the_primary_address_is_global_and_own():
    held = [own for own in own_addresses() if own.is_global and own.family is IPFamily.IPV4]
    primary = primary_address(IPFamily.IPV4)
    assert primary in [own.address for own in held] if held else primary == ""


def test_without_a_route_the_first_global_address_is_primary(monkeypatch):
    own = (
        OwnAddress(address="127.0.0.1", prefix=8, interface=1, is_global=False),
        OwnAddress(address="203.0.113.9", prefix=24, interface=2, is_global=True),
        OwnAddress(address="203.0.113.10", prefix=24, interface=2, is_global=True),
    )
    monkeypatch.setattr(addresses, "own_addresses", lambda: own)
    assert primary_address(IPFamily.IPV4) == "203.0.113.9"
    assert primary_address(IPFamily.IPV6) == ""


@pytest.mark.row("15.2")
def test_ipv6_can_be_missing_or_switched_off(tmp_path):
    assert usable_families(tmp_path) == (IPFamily.IPV4,)
    (tmp_path / "net").mkdir()
    (tmp_path / "net/if_inet6").write_text("")
    assert usable_families(tmp_path) == FAMILIES
    switch = tmp_path / "sys/net/ipv6/conf/all/disable_ipv6"
    switch.parent.mkdir(parents=True)
    switch.write_text("0\n")
    assert usable_families(tmp_path) == FAMILIES
    switch.write_text("1\n")
    assert usable_families(tmp_path) == (IPFamily.IPV4,)
