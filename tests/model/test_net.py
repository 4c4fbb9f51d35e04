"""Texts of addresses."""

import ipaddress

from narthex.model import net


def test_ipv6_text_has_no_dots_whatever_ipaddress_writes(monkeypatch):
    texts = {
        "::ffff:10.0.0.1": "::ffff:a00:1",
        "::ffff:0:7": "::ffff:0:7",
        "FD00::0:1": "fd00::1",
        "::1.2.3.4": "::102:304",
    }
    assert {text: net.ipv6_text(text) for text in texts} == texts

    class Dotted(ipaddress.IPv6Address):
        """As Python 3.13 writes it."""

        def __str__(self):
            return "::ffff:10.0.0.1"

    monkeypatch.setattr(net.ipaddress, "IPv6Address", Dotted)
    assert net.ipv6_text("::ffff:a00:1") == "::ffff:a00:1"
