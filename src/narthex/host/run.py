"""The only place that starts other programs and waits for them."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Sequence

from narthex.host import netns

TimeoutExpired = subprocess.TimeoutExpired
"""For those who catch it: nobody else needs the module that it comes from."""


STARTED: deque[int] = deque(maxlen=64)
"""Process ids of the programs started last: the kernel's notifications name the writer by them."""


class CommandError(RuntimeError):
    """A program ended with an error; the message holds the command and what it said."""

    def __init__(self, argv: Sequence[str], status: int, said: str) -> None:
        super().__init__(f"{' '.join(argv)}: exit status {status}: {said.strip() or 'no message'}")
        self.argv = tuple(argv)
        self.status = status
        self.said = said


def run(argv: Sequence[str], *, stdin: str = "", namespace: str | None = None, timeout: float = 300) -> str:
    """Run a program without a shell and return what it printed.

    `namespace` is a named network namespace, None for the present one. Raises CommandError when the program fails,
    FileNotFoundError when it is not installed, subprocess.TimeoutExpired after `timeout` seconds.
    """
    with netns.entered(namespace):
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    STARTED.append(process.pid)
    with process:
        try:
            printed, said = process.communicate(stdin, timeout)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise CommandError(argv, process.returncode, said or printed)
    return printed
