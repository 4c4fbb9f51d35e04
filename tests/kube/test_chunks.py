"""The chunked coding of HTTP/1.1: whatever way it is cut, the same content comes out, and what is not it is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.kube.transport import ChunkDecoder, ChunkError


def coded(parts, *, extension=b"", trailers=b""):
    return b"".join(b"%x%s\r\n%s\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailers + b"\r\n"


def fed(chunks, data, cuts):
    places = [0, *sorted({min(cut, len(data)) for cut in cuts}), len(data)]
    return b"".join(chunks.feed(data[start:end]) for start, end in itertools.pairwise(places))


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.lists(st.integers(0, 300), max_size=12),
    st.sampled_from([b"", b";a=b", b' ;x="y z"']),
    st.sampled_from([b"", b"Expires: never\r\n", b"A: 1\r\nB: 2\r\n"]),
    st.binary(max_size=5),
)
def test_content_does_not_depend_on_where_it_is_cut(parts, cuts, extension, trailers, beyond):
    data = coded(parts, extension=extension, trailers=trailers)
    chunks = ChunkDecoder()
    assert fed(chunks, data, cuts) == b"".join(parts)
    assert chunks.ended
    assert chunks.feed(beyond) == b""
    whole = ChunkDecoder()
    assert whole.feed(data + beyond) == b"".join(parts)
    assert whole.beyond == beyond


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.data())
def test_content_comes_as_soon_as_it_is_there(parts, data):
    text = coded(parts)
    cut = data.draw(st.integers(0, len(text) - 1))
    chunks = ChunkDecoder()
    found = chunks.feed(text[:cut])
    assert b"".join(parts).startswith(found)
    assert not chunks.ended
    at = 0
    for part in parts:
        head = len(b"%x\r\n" % len(part))
        if cut >= at + head + len(part):
            assert found.startswith(part)
            found = found[len(part) :]
            at += head + len(part) + 2
        else:
            assert found == part[: max(0, cut - at - head)]
            break


@pytest.mark.parametrize(
    "data",
    [
        b"x\r\n",
        b"\r\n",
        b"-1\r\n",
        b"+1\r\n",
        b"0x1\r\n",
        b"1_0\r\n",
        b" 1\r\n",
        b"1\r\nab\r\n",
        b"1\r\na\n",
        b"1\r\na\rb",
        b"1111111111111111\r\n",
        b"1;" + b"a" * 20000,
        b"1;a\nb\r\n",
        b"0\r\n" + b"A: b\r\n" * 5000,
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_not_in_this_coding_is_refused(data, at_once):
    chunks = ChunkDecoder()
    with pytest.raises(ChunkError):
        for part in [data] if at_once else [data[index : index + 1] for index in range(len(data))]:
            chunks.feed(part)
