"""What the API's server needs of those who run pods: what a container writes, and programs within it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, Protocol


class PodProcess(Protocol):
    """A program in a pod, which has been started.

    With a terminal, `stdin` and `stdout` are both of the terminal's master and `stderr` is None.
    """

    @property
    def stdin(self) -> BinaryIO | None:
        """What it reads, None when nothing is sent to it."""
        ...

    @property
    def stdout(self) -> BinaryIO | None:
        """What it writes."""
        ...

    @property
    def stderr(self) -> BinaryIO | None:
        """What it complains."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """The terminal has another size."""
        ...

    def wait(self) -> int:
        """Its exit status, when it has ended; 128 and the signal for one that was killed."""
        ...

    def kill(self) -> None:
        """End it; nothing happens when it has ended."""
        ...


class PodRuntime(Protocol):
    """The pods that run, wherever they do. Both raise ApiFault for what cannot be done; both are called without the lock."""

    def logs(
        self,
        namespace: str,
        pod: str,
        container: str,
        tail: int | None,
        follow: bool,
        since: float | None,
        previous: bool,
        timestamps: bool,
    ) -> Iterator[bytes]:
        """What a container has written, in pieces of whole lines.

        `tail`: so many last lines; `since`: seconds since 1970; `previous`: of the run before this one;
        `timestamps`: each line begins with its time. With `follow` it
        goes on until the container ends, and yields `b""` at least once a second while there is nothing new, so that a
        client which has gone is noticed; the iterator is closed then.
        """
        ...

    def exec(self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool) -> PodProcess:
        """Start a program in a container."""
        ...
