"""Who listens, from `ss`."""

from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import FAMILIES, IPFamily
from narthex.trace.follow.views import ListeningSocket
from narthex.trace.node.network import listeners_of

TEXT = """\
udp UNCONN 0      0      127.0.0.53%lo:53    0.0.0.0:*
udp UNCONN 0      0                  *:8472        *:*
tcp LISTEN 0      128          0.0.0.0:22    0.0.0.0:*
tcp LISTEN 0      128             [::]:22       [::]:*
tcp LISTEN 0      5     [fe80::1]%eth0:80       [::]:*
tcp LISTEN 0      5   [::ffff:10.0.0.1]:81         *:*
p_raw UNCONN 0    0                  *:eth0        *
"""


def test_forms_of_places() -> None:
    assert listeners_of(TEXT) == (
        ListeningSocket("udp", "127.0.0.53", 53, (IPFamily.IPV4,)),
        ListeningSocket("udp", "", 8472, FAMILIES),
        ListeningSocket("tcp", "", 22, (IPFamily.IPV4,)),
        ListeningSocket("tcp", "", 22, (IPFamily.IPV6,)),
        ListeningSocket("tcp", "fe80::1", 80, (IPFamily.IPV6,)),
        ListeningSocket("tcp", "10.0.0.1", 81, (IPFamily.IPV4,)),
    )


@given(st.text(max_size=200))
def test_strange_text_is_passed_over(text: str) -> None:
    listeners_of(text)
    listeners_of(f"tcp LISTEN 0 0 {text} x")
