"""The server in the lab's pods, on the loopback addresses."""

import socket
import threading

import pytest
from tests.free_ports import free_port

from narthex.lab.kubelet.program.echo import EchoServer


@pytest.fixture
def server():
    echo = EchoServer()
    thread = threading.Thread(target=echo.serve)
    thread.start()
    yield echo
    echo.stop()
    thread.join()


@pytest.fixture
def port():
    """A port that is free for both protocols."""
    return free_port("", (socket.SOCK_STREAM, socket.SOCK_DGRAM))


def ask(port, request, host="127.0.0.1"):
    with socket.create_connection((host, port), timeout=30) as sock:
        sock.sendall(request)
        own = sock.getsockname()
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        while part := sock.recv(65536):
            answer += part
    return answer, own[1]


def test_http(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    answer, own = ask(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert body == f"web-1 on node-1, asked by 127.0.0.1:{own}\n".encode()


def test_requests_on_one_connection_also_in_pieces(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, sock.makefile("rb") as stream:
        for pieces in (
            [b"GET /1 HTTP/1.1\r\n\r\n"],
            [b"PO", b"ST / HTTP/1.1\r\nContent-", b"Length: 4\r\n\r\nab", b"cd"],
        ):
            for piece in pieces:
                sock.sendall(piece)
            assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
            length = 0
            while (line := stream.readline()) != b"\r\n":
                length = int(line.split()[1]) if line.startswith(b"Content-Length") else length
            assert stream.read(length).startswith(b"web-1 on node-1")


def test_head_and_close(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, sock.makefile("rb") as stream:
        sock.sendall(b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
        answer = stream.read()
    assert answer.endswith(b"\r\n\r\n")
    assert b"Connection: close" in answer


def test_text_that_is_not_http(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    assert ask(port, b"hello\n")[0].startswith(b"web-1 on node-1, asked by 127.0.0.1:")


def test_ipv6(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    answer, own = ask(port, b"hello\n", host="::1")
    assert answer == f"web-1 on node-1, asked by [::1]:{own}\n".encode()


def test_udp(server, port):
    server.add("a", "dns-1 on node-1", None, [("UDP", port), ("TCP", port)])
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.settimeout(30)
        sock.sendto(b"?", ("127.0.0.1", port))
        answer, peer = sock.recvfrom(1000)
        assert answer == f"dns-1 on node-1, asked by 127.0.0.1:{sock.getsockname()[1]}\n".encode()
    assert peer == ("127.0.0.1", port)


def test_a_taken_port_leaves_nothing_behind(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    with pytest.raises(OSError, match=f"cannot listen on TCP port {port}: Address already in use"):
        server.add("b", "web-2 on node-1", None, [("UDP", port), ("TCP", port)])
    server.add("b", "web-2 on node-1", None, [("UDP", port)])


def test_removal_ends_listening_and_open_connections(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"hello\n")
        assert sock.recv(100)
        server.remove("a")
        assert sock.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=30)


def test_clients_that_vanish_do_no_harm(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    for _ in range(20):
        sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.sendall(b"GET / HTTP/1.1\r\n")
        sock.close()
    assert ask(port, b"still there?\n")[0].startswith(b"web-1")


def test_endless_requests_are_cut(server, port):
    server.add("a", "web-1 on node-1", None, [("TCP", port)])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock, pytest.raises(OSError):
        for _ in range(100):
            sock.sendall(b"GET /" + b"x" * 10_000)
        if sock.recv(100) == b"":
            raise ConnectionResetError


def test_it_may_be_stopped_when_it_has_stopped_by_itself():
    """`stop` sets the flag before it rings: the loop may have seen it, and closed the doorbell, in between."""
    server = EchoServer()
    server.stop()
    server.serve()
    server.stop()
