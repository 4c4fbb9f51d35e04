"""The rules of node-local DNS, as text; the kernel reads them in tests/dns/kernel/test_dns_node_local.py."""

import pytest

from narthex.dns.program.node_local import notrack_tables


def test_a_table_for_each_family():
    text = notrack_tables(["169.254.20.10", "FD6E::A", "10.110.0.10"], {53})
    assert text.count("table ip narthex-dns {") == text.count("table ip6 narthex-dns {") == 1
    assert "ip daddr { 10.110.0.10, 169.254.20.10 } meta l4proto { tcp, udp } th dport { 53 } notrack" in text
    assert "ip6 saddr { fd6e::a } meta l4proto { tcp, udp } th sport { 53 } notrack" in text


def test_what_is_not_needed_is_not_there():
    assert "ip6" not in notrack_tables(["169.254.20.10"])
    assert notrack_tables([]) == ""


@pytest.mark.parametrize("text", ["10.0.0.1; flush ruleset", "10.0.0.1/8", "localhost", ""])
def test_only_addresses_become_rules(text):
    with pytest.raises(ValueError, match="address"):
        notrack_tables([text])
