"""What a machine must have before a proxy starts on it."""

import logging

import pytest

from narthex.model.net import FAMILIES, IPFamily
from narthex.proxy.backends import BACKENDS
from narthex.proxy.kernel import dataplanes
from narthex.proxy.kernel import virtual_servers as kernel
from narthex.proxy.kernel.virtual_servers import NoIpvsError
from narthex.proxy.program import dataplane as checks
from narthex.proxy.program.dataplane import check_machine, refusal
from narthex.runtime.process import StartError


def working_modes():
    return [mode for mode in BACKENDS if not refusal(mode)]


def take_tools(monkeypatch, missing):
    """Let `missing` decide which of the tools of a mode and family are missing."""
    monkeypatch.setattr(checks, "missing_tools", missing)
    monkeypatch.setattr(dataplanes, "missing_tools", missing)


@pytest.fixture
def machine(monkeypatch, caplog):
    """A machine that has everything; tests take things away."""
    monkeypatch.setattr(checks, "may_change_network", lambda: True)
    monkeypatch.setattr(checks, "usable_families", lambda: FAMILIES)
    take_tools(monkeypatch, lambda _: ())
    monkeypatch.setattr(dataplanes, "nft_release", lambda: (1, 0, 6))
    caplog.set_level(logging.INFO, "narthex")
    return monkeypatch


@pytest.mark.usefixtures("machine")
def test_both_families_where_both_work():
    assert check_machine("nftables") == FAMILIES


def test_without_the_right_to_program_the_kernel_it_says_so(machine):
    machine.setattr(checks, "may_change_network", lambda: False)
    with pytest.raises(StartError, match="needs root"):
        check_machine("nftables")


@pytest.mark.row("15.2")
def test_without_ipv6_only_ipv4_is_served(machine, caplog):
    machine.setattr(checks, "usable_families", lambda: (IPFamily.IPV4,))
    assert check_machine("nftables") == (IPFamily.IPV4,)
    assert "IPv6 is switched off here" in caplog.text


@pytest.mark.row("15.3")
def test_without_the_tool_of_the_mode_it_says_what_to_install(machine):
    take_tools(machine, lambda tools: tuple(tool for tool in tools if tool == "nft"))
    with pytest.raises(
        StartError, match="mode nftables needs nft, not found on the PATH: install the package nftables"
    ):
        check_machine("nftables")


@pytest.mark.row("15.3")
def test_a_family_whose_tool_is_missing_is_left_alone(machine, caplog):
    take_tools(machine, lambda tools: tuple(tool for tool in tools if tool == "ip6tables-save"))
    assert check_machine("iptables") == (IPFamily.IPV4,)
    assert "ip6tables-save is not found on the PATH: IPv6 is left alone" in caplog.text


@pytest.mark.parametrize("release, skip, starts", [((5, 12), "", False), ((5, 12), "1", True), ((5, 13), "", True)])
@pytest.mark.row("23.1")
def test_nftables_mode_needs_a_kernel_that_can(machine, release, skip, starts):
    """Row 23.1."""
    machine.setattr(dataplanes, "kernel_release", lambda: release)
    machine.setenv(dataplanes.SKIP_KERNEL_CHECK, skip)
    if starts:
        assert check_machine("nftables") == FAMILIES
    else:
        with pytest.raises(StartError, match=r"needs Linux 5\.13 or newer: choose --proxy-mode iptables"):
            check_machine("nftables")


@pytest.mark.parametrize("release, starts", [((0, 9, 8), False), ((1, 0, 0), False), ((1, 0, 1), True), ((), True)])
@pytest.mark.row("23.1")
def test_nftables_mode_needs_an_nft_that_can(machine, release, starts):
    machine.setattr(dataplanes, "nft_release", lambda: release)
    assert check_machine("iptables") == FAMILIES
    if starts:
        assert check_machine("nftables") == FAMILIES
    else:
        with pytest.raises(
            StartError, match=r"needs nft 1\.0\.1 or newer: install it, or choose --proxy-mode iptables"
        ):
            check_machine("nftables")


@pytest.mark.row("24.1")
def test_without_ip_vs_it_says_which_modes_work_here(machine):
    def refuse():
        raise NoIpvsError("this kernel has no IP_VS (module ip_vs)")

    machine.setattr(kernel, "connect", refuse)
    machine.setattr(dataplanes, "nft_release", lambda: (0, 9, 0))
    others = [mode for mode in BACKENDS if mode not in ("ipvs", "nftables")]
    with pytest.raises(StartError) as told:
        check_machine("ipvs")
    assert str(told.value) == (
        f"mode ipvs cannot run, since this kernel has no IP_VS (module ip_vs): {' and '.join(others)} would work here"
    )
    assert working_modes() == others


@pytest.mark.row("24.1")
def test_ipvs_needs_ipset(machine):
    take_tools(machine, lambda tools: tuple(tool for tool in tools if tool in ("iptables-save", "ipset")))
    with pytest.raises(
        StartError, match=r"mode ipvs needs iptables-save and ipset, .*: install the package iptables and ipset"
    ):
        check_machine("ipvs")
