"""SPDY frames, which kubectl before 1.31 speaks."""

import zlib

import pytest

from narthex.lab.server.spdy import DICTIONARY, BadSpdyFrame, SpdyData, SpdyFraming, SpdyReset, SpdyStream


class Client:
    """The client's side: frames that a server receives."""

    def __init__(self):
        self._deflate = zlib.compressobj(zdict=DICTIONARY)

    def control(self, kind, body, flags=0):
        return b"\x80\x03" + kind.to_bytes(2, "big") + bytes((flags,)) + len(body).to_bytes(3, "big") + body

    def stream(self, number, headers, flags=0):
        words = [word.encode() for pair in headers.items() for word in pair]
        plain = len(headers).to_bytes(4, "big") + b"".join(len(word).to_bytes(4, "big") + word for word in words)
        block = self._deflate.compress(plain) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return self.control(1, number.to_bytes(4, "big") + bytes(6) + block, flags)

    def data(self, number, data, flags=0):
        return number.to_bytes(4, "big") + bytes((flags,)) + len(data).to_bytes(3, "big") + data


def test_the_dictionary_is_that_of_the_specification():
    assert (len(DICTIONARY), zlib.adler32(DICTIONARY)) == (1423, 0xE3C6A7C2)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_streams_and_data_arrive_in_any_pieces(size):
    client, server = Client(), SpdyFraming()
    sent = client.stream(1, {"streamtype": "stdin", "x": ""}) + client.stream(3, {"streamtype": "stdin"})
    sent += client.data(1, b"abc") + client.data(3, b"", 1) + client.data(9, b"no such stream")
    sent += (
        client.control(3, (1).to_bytes(4, "big") + bytes(4)) + client.control(9, bytes(8)) + client.control(6, b"ping")
    )
    found = [event for at in range(0, len(sent), size) for event in server.feed(sent[at : at + size])]
    assert found == [
        SpdyStream(1, {"streamtype": "stdin", "x": ""}),
        SpdyStream(3, {"streamtype": "stdin"}),
        SpdyData(1, b"abc", False),
        SpdyData(3, b"", True),
        SpdyReset(1),
    ]
    # A reply to each stream, and to the ping.
    assert server.pending.startswith(b"\x80\x03\x00\x02") and server.pending.endswith(client.control(6, b"ping"))
    assert server.data(3, b"x", last=True) == client.data(3, b"x", 1)
    assert server.data(1, b"x") == server.reset(1) == b""
    assert server.goaway() == client.control(7, (3).to_bytes(4, "big") + bytes(4))


def test_what_is_no_spdy_is_refused():
    client = Client()
    for sent in (
        b"\x80\x02\x00\x01\x00\x00\x00\x00",
        client.control(1, bytes(10) + b"no zlib"),
        b"\0\0\0\1\0\xff\xff\xff",
    ):
        with pytest.raises(BadSpdyFrame):
            list(SpdyFraming().feed(sent))
    server = SpdyFraming()
    with pytest.raises(BadSpdyFrame, match="at most 1000 streams"):
        for number in range(1, 2100, 2):
            list(server.feed(client.stream(number, {})))
