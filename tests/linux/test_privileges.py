"""What a process may do, and what it finds installed."""

import resource

import pytest

from narthex.linux.privileges import allow_many_files, may_change_network, missing_tools, nft_release


def test_cap_net_admin_is_bit_12(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000001000\n")
    assert may_change_network(status)
    status.write_text("Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000000fff\n")
    assert not may_change_network(status)
    status.write_text("Name:\tx\n")
    assert not may_change_network(status)


def test_missing_tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing_tools(("nft",)) == ("nft",)
    tools = ("ip6tables-save", "ip6tables-restore")
    assert missing_tools(tools) == tools
    for tool in tools:
        (tmp_path / tool).touch(0o755)
    assert missing_tools(tools) == ()


@pytest.mark.parametrize(
    "said, release",
    [
        ("nftables v1.0.6 (Lester Gooch #5)", (1, 0, 6)),
        ("nftables v0.9.8 (E.D.S.)", (0, 9, 8)),
        ("nftables v1.1 (Commodore)", (1, 1, 0)),
        ("something else", ()),
    ],
)
@pytest.mark.row("23.1")
def test_what_nft_says_of_itself(tmp_path, monkeypatch, said, release):
    (tmp_path / "nft").write_text(f"#!/bin/sh\necho '{said}'\n")
    (tmp_path / "nft").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nft_release() == release


def test_as_many_files_as_there_may_be():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
