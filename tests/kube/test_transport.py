"""HTTP/1.1 as servers speak it: each way to end an answer, each way to break off, connections that are used again."""

import asyncio
import contextlib
import ssl
import tracemalloc

import httpx2
import pytest

from narthex.kube.transport import ApiTransport

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with the next of its answers, byte by byte as they stand; None hangs up."""

    def __init__(self, *answers, pieces=1 << 20, greeting=b""):
        self.answers = list(answers)
        self.pieces = pieces
        self.late = greeting
        self.connections = 0
        self.requests = []
        self._tasks = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError):
            pass  # The client has gone.
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length")), 0)
        self.requests.append(head + await reader.readexactly(length))
        answer = self.answers.pop(0)
        if answer is None:
            return False
        for at in range(0, len(answer), self.pieces):
            writer.write(answer[at : at + self.pieces])
            await writer.drain()
            await asyncio.sleep(0)
        if b"Connection: close" in answer or not (b"Length" in answer or b"chunked" in answer):
            writer.write_eof()
            return False
        writer.write(self.late)
        return True


def asked(server, work):
    """What comes of some work with a client of the server."""

    async def run():
        transport = ApiTransport(ssl.create_default_context())
        async with server, httpx2.AsyncClient(transport=transport, base_url=server.url, timeout=20) as client:
            return await work(client)

    return asyncio.run(run())


async def read(client):
    return (await client.get("/api")).content


@pytest.mark.parametrize("pieces", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", b"to the end"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", b"to the end"),
        (CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    ],
)
def test_answers(answer, body, pieces):
    assert asked(Server(answer, pieces=pieces), read) == body


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"HTTP/1.1 200 O",
        b"what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nhello",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"9\r\nhello",
        CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"5\r\nhello\r\n",
        CHUNKED + b"nothing like this\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: zipped\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    ],
)
def test_answers_that_are_not_whole_are_errors(answer):
    with pytest.raises(httpx2.TransportError):
        asked(Server(answer), read)


def test_nobody_listens():
    async def run():
        async with httpx2.AsyncClient(transport=ApiTransport(ssl.create_default_context())) as client:
            await client.get("http://127.0.0.1:1/")

    with pytest.raises(httpx2.ConnectError):
        asyncio.run(run())


def test_tls_is_never_left_out():
    async def run():
        async with httpx2.AsyncClient(transport=ApiTransport(None)) as client:
            await client.get("https://127.0.0.1:1/")

    with pytest.raises(httpx2.UnsupportedProtocol):
        asyncio.run(run())


def test_a_connection_is_used_again():
    server = Server(*[CHUNKED + b"2\r\nok\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] * 2)

    async def work(client):
        return [await read(client) for _ in range(4)]

    assert asked(server, work) == [b"ok"] * 4
    assert server.connections == 1


@pytest.mark.parametrize(
    "server",
    [
        # What nobody asked for must not be taken for the next answer.
        Server(*[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"] * 3, greeting=b"HTTP/1.1 408 Late\r\n\r\n"),
        Server(*[b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokmore"] * 3),
        Server(*[CHUNKED + b"2\r\nok\r\n0\r\n\r\nmore"] * 3),
        Server(*[b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"] * 3),
        Server(*[b"HTTP/1.0 200 OK\r\n\r\nok"] * 3),
    ],
    ids=["late words", "too long", "beyond the last chunk", "said to close", "ended"],
)
def test_a_connection_that_is_of_no_use_is_not(server):
    async def work(client):
        found = []
        for _ in range(3):
            found.append(await read(client))
            await asyncio.sleep(0.05)
        return found

    assert asked(server, work) == [b"ok"] * 3
    assert server.connections == 3


def test_one_that_was_not_read_to_its_end_is_not_either():
    server = Server(*[CHUNKED + b"2\r\nok\r\n"] * 2)

    async def work(client):
        for _ in range(2):
            async with client.stream("GET", "/") as answer:
                assert [part async for part in _first(answer.aiter_bytes())] == [b"ok"]

    asked(server, work)
    assert server.connections == 2


async def _first(parts):
    async for part in parts:
        yield part
        return


def test_bodies_are_sent_whole_and_a_full_line_is_waited_for():
    body = b"x" * 3_000_000
    server = Server(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async def work(client):
        return (await client.put("/big", content=body)).content

    assert asked(server, work) == b"ok"
    assert server.requests[0].startswith(b"PUT /big HTTP/1.1\r\n")
    assert server.requests[0].endswith(body)


def test_more_than_is_read_waits_at_the_server():
    size = 8 << 20
    server = Server(CHUNKED + b"%x\r\n" % size + b"y" * size + b"\r\n0\r\n\r\n", pieces=1 << 16)

    async def work(client):
        async with client.stream("GET", "/") as answer:
            await asyncio.sleep(0.1)
            return sum([len(part) async for part in answer.aiter_raw()])

    assert asked(server, work) == size


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "a\0b"])
def test_a_header_is_one_line(value):
    with pytest.raises((httpx2.LocalProtocolError, ValueError)):
        asked(
            Server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
            lambda client: client.get("/", headers={"X-A": value}),
        )


@pytest.mark.parametrize("kind", ["connect", "read"])
def test_patience_ends(kind):
    done = []

    async def silent(reader, writer):
        done.append(asyncio.current_task())
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async def run():
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        timeout = httpx2.Timeout(20, **{kind: 0.05})
        if kind == "connect":
            url = url.replace("http", "https")  # It never says a word of TLS.
        async with (
            server,
            httpx2.AsyncClient(transport=ApiTransport(ssl.create_default_context()), timeout=timeout) as client,
        ):
            try:
                await client.get(url)
            finally:
                await client.aclose()
                await asyncio.gather(*done)

    with pytest.raises(httpx2.ConnectTimeout if kind == "connect" else httpx2.ReadTimeout):
        asyncio.run(run())


def test_closing_ends_what_is_being_read():
    server = Server(CHUNKED + b"2\r\nok\r\n")

    async def work(client):
        async with client.stream("GET", "/") as answer:
            parts = answer.aiter_bytes()
            assert await anext(parts) == b"ok"
            await client._transport.aclose()
            with pytest.raises(httpx2.RemoteProtocolError):
                await anext(parts)

    asked(server, work)


def test_a_watch_keeps_nothing_of_what_it_has_read():
    """The first answer of a watch has all objects: what was read is freed while the next line is awaited."""
    size = 1 << 20

    async def watch(client):
        async with client.stream("GET", "/watch") as response:
            left, chunks = size, response.aiter_bytes()
            while left:
                left -= len(await anext(chunks))
            following = asyncio.ensure_future(anext(chunks))
            await asyncio.sleep(0.05)
            kept, _ = tracemalloc.get_traced_memory()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            return kept

    asked(Server(CHUNKED + b"0\r\n\r\n"), read)
    tracemalloc.start()
    try:
        kept = asked(Server(CHUNKED + b"%x\r\n%s\r\n" % (size, b"x" * size)), watch)
        assert kept < size / 8
    finally:
        tracemalloc.stop()
