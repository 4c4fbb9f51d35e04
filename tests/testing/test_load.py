"""A load on a Service, here without one: what it counts must be the network's faults and none of its own."""

import contextlib
import socket
import threading

from tests.free_ports import free_port

from narthex.testing.load import EchoEndpoints, Load, until

UDP = (socket.SOCK_DGRAM,)


class Line:
    """A kept connection that notices when two threads use it at once."""

    endpoint = "10.0.0.1:80"

    class way:
        label = "from a test"

    def __init__(self):
        self.used = 0
        self._busy = threading.Lock()

    def exchange(self):
        if not self._busy.acquire(blocking=False):
            raise ConnectionError("used by two threads at once")
        try:
            self.used += 1
            threading.Event().wait(0.001)
        finally:
            self._busy.release()

    def close(self):
        pass


def test_a_kept_connection_is_used_by_one_thread_at_a_time():
    load = Load([Line.way])
    load._call = lambda: None
    load.held = [line := Line()]
    with load.streaming(pause=0.0):
        for _ in range(50):
            load.exchange()
    assert line.used > 50
    assert load.failures == []


def answer(port: int) -> str:
    """The answer of a UDP endpoint; an empty text if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(0.2)
        client.connect(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            client.send(b"?")
            return client.recv(100).decode()
    return ""


def answers(port: int, text: str) -> None:
    until(lambda: answer(port) == text, f"the answer {text!r}")


def test_an_endpoint_that_is_shut_down_leaves_the_others():
    one, other = free_port(kinds=UDP), free_port(kinds=UDP)
    with EchoEndpoints() as endpoints:
        endpoints.answer_datagrams(None, "127.0.0.1", one, "one")
        endpoints.answer_datagrams(None, "127.0.0.1", other, "other")
        answers(one, "one")
        with contextlib.suppress(OSError):
            # The kernel complains that there is no peer, and shuts the socket down all the same.
            endpoints._responders[0].shutdown(socket.SHUT_RD)
        answers(other, "other")


def test_endpoints_that_end_under_load_leave_no_thread_and_no_port():
    port = free_port(kinds=UDP)
    before = set(threading.enumerate())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for number in range(10):
            with EchoEndpoints() as endpoints:
                endpoints.answer_datagrams(None, "127.0.0.1", port, str(number))
                answers(port, str(number))
                for _ in range(200):
                    client.sendto(b"?", ("127.0.0.1", port))
            assert set(threading.enumerate()) == before
