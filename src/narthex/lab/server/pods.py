"""What the API server needs from the nodes: the logs of containers, and programs within them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, Protocol


class PodProcess(Protocol):
    """A program that was started in a pod.

    With a terminal, `stdin` and `stdout` are the terminal's master, and `stderr` is None.
    """

    @property
    def stdin(self) -> BinaryIO | None:
        """Its standard input, None if nothing is sent to it."""
        ...

    @property
    def stdout(self) -> BinaryIO | None:
        """Its standard output."""
        ...

    @property
    def stderr(self) -> BinaryIO | None:
        """Its standard error."""
        ...

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal."""
        ...

    def wait(self) -> int:
        """Wait for the program. Return its exit status; for one that a signal ended, 128 and the signal."""
        ...

    def kill(self) -> None:
        """Kill the program, if it still runs."""
        ...


class PodRuntime(Protocol):
    """The pods that run, on any node. Its methods raise StatusError and are called without the registry's lock."""

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
        """Yield a container's log in pieces of whole lines.

        With `follow`, it continues until the container ends, and yields `b""` at least once a second while there is nothing new, so that
        the server notices a client that is gone and closes the iterator.

        Args:
            namespace: the pod's namespace.
            pod: its name.
            container: the container's name.
            tail: number of last lines. None: all.
            follow: wait for further lines.
            since: seconds since 1970; earlier lines are omitted.
            previous: read the log of the previous run.
            timestamps: begin each line with its time.
        """
        ...

    def exec(self, namespace: str, pod: str, container: str, argv: Sequence[str], stdin: bool, tty: bool) -> PodProcess:
        """Start a program in a container."""
        ...
