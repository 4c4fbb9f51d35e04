"""SCTP written by hand."""

import pytest

from narthex.model.net import Protocol
from narthex.testing.kernel.client import ProbeClient, crc32c, first_packet, sctp_packet


def test_checksum_known_answers():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


def test_sctp_packet():
    packet = sctp_packet(40000, 80, 0, 1, 0xDEADBEEF)
    assert len(packet) == 32 and packet[:4] == b"\x9c\x40\x00\x50"
    assert int.from_bytes(packet[8:12], "little") == crc32c(packet[:8] + bytes(4) + packet[12:])
    assert first_packet(packet, Protocol.SCTP) == b"\xde\xad\xbe\xef"
    assert first_packet(sctp_packet(80, 40000, 1, 2, 1), Protocol.SCTP) is None


def test_only_a_syn_is_a_first_packet():
    head = bytearray(20)
    for flags, first in ((0x02, True), (0x12, False), (0x10, False), (0x04, False), (0xC2, True)):
        head[13] = flags
        assert (first_packet(bytes(head), Protocol.TCP) is not None) is first


@pytest.mark.parametrize(
    ("protocol", "refusal", "excused"),
    [
        (Protocol.UDP, "ICMP type 1 code 0", True),
        (Protocol.UDP, "port unreachable", False),
        (Protocol.UDP, "refused", False),
        (Protocol.TCP, "No route to host", False),
    ],
)
def test_only_what_no_port_says_is_asked_again(protocol, refusal, excused):
    client = ProbeClient("127.0.0.1", "127.0.0.1", 9, protocol)
    with client.socket:
        client.refusal = refusal
        assert client.excuse() is excused
        assert client.refusal == ("" if excused else refusal)
