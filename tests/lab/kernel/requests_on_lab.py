"""Requests to a lab's Services while things change: who answers, and what fails."""

import itertools
import socket
import threading
from collections.abc import Sequence
from typing import Any

from narthex.linux.namespaces import in_namespace

PATIENCE = 30.0
PAUSE = 0.01


class Requests:
    """Requests over HTTP, each on a connection of its own, from several places in turn; what fails is written down."""

    def __init__(self, ways: Sequence[Any], pause: float = PAUSE) -> None:
        """`ways`: network namespace, address and port of each; `pause`: seconds between two requests."""
        self._pause = pause
        self._ways = itertools.cycle(ways)
        self.answered: dict[str, int] = {}
        """Who answered, and how often."""
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> "Requests":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def made(self) -> int:
        return sum(self.answered.values()) + len(self.failures)

    def _go_on(self) -> None:
        while not self._ended.wait(self._pause):
            namespace, address, port = next(self._ways)
            try:
                pod = ask(namespace, address, port)
                self.answered[pod] = self.answered.get(pod, 0) + 1
            except OSError as error:
                self.failures.append(f"{namespace} to {address}:{port}: {error!r}")


def ask(namespace: str, address: str, port: int) -> str:
    """The name of the pod that answers. Raises OSError."""
    with in_namespace(namespace):
        sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    with sock:
        sock.settimeout(PATIENCE)
        sock.connect((address, port))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := sock.recv(65536):
            answer += part
    if not answer.startswith(b"HTTP/1.1 200 ") or b" on node-" not in answer:
        raise ConnectionError(f"answered {answer!r}")
    return answer.decode().splitlines()[-1].split()[0]
