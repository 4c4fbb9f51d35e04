"""What replaces in WebAssembly what Python lacks there, beside the real thing."""

import importlib.util
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SUBSTITUTES = Path(__file__).parents[2] / "playground" / "substitute"


@pytest.fixture(scope="module")
def ipv6_text():
    """The module, which then replaces nothing here."""
    spec = importlib.util.spec_from_file_location("ipv6_text", SUBSTITUTES / "ipv6_text.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("inet_pton", "inet_ntop"):
            patch.setattr(f"socket.{name}", getattr(socket, name))
            patch.setattr(f"_socket.{name}", getattr(socket, name))
        spec.loader.exec_module(module)
    return module


GROUP = st.sampled_from([0, 0, 0, 1, 0xFFFF, 0x0A00]) | st.integers(0, 0xFFFF)


@given(st.lists(GROUP, min_size=8, max_size=8))
def test_addresses_are_written_as_by_glibc(ipv6_text, groups):
    packed = b"".join(group.to_bytes(2, "big") for group in groups)
    text = socket.inet_ntop(socket.AF_INET6, packed)
    assert ipv6_text.inet_ntop(socket.AF_INET6, packed) == text
    assert ipv6_text.inet_pton(socket.AF_INET6, text) == packed


WORDS = st.sampled_from(
    ["", ":", "::", "1", "ffff", "12345", "01", "1.2.3.4", "1.2.3", "g", "%eth0", "::1", " ", "256.1.1.1"]
)


@given(st.lists(WORDS, max_size=8).map("".join) | st.lists(WORDS, max_size=9).map(":".join))
def test_the_same_texts_are_addresses(ipv6_text, text):
    results = []
    for pton in (socket.inet_pton, ipv6_text.inet_pton):
        try:
            results.append(pton(socket.AF_INET6, text))
        except OSError:
            results.append(None)
    assert results[0] == results[1], text


def test_ipv4_is_left_alone(ipv6_text):
    assert ipv6_text.inet_ntop(socket.AF_INET, b"\n\0\0\1") == "10.0.0.1"
    assert ipv6_text.inet_pton(socket.AF_INET, "10.0.0.1") == b"\n\0\0\1"
    with pytest.raises(ValueError, match="invalid length"):
        ipv6_text.inet_ntop(socket.AF_INET6, b"\n\0\0\1")
