"""`narthex proxy` as a process, and what the kernel and its log say of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from narthex.testing.build import NODE


class Proxy:
    """`narthex proxy` (or `node`, which has it as its part) as a process of its own, in the namespace of the calling thread."""

    def __init__(self, url: str, mode: str, program: str = "proxy", health: str = "") -> None:
        self.started = time.time()
        argv = [sys.executable, "-m", "narthex", program, "--master", url, "--hostname-override", NODE]
        argv += ["--proxy-mode", mode, "--cluster-cidr", "10.64.0.0/12", "--v", "2", "--healthz-bind-address", health]
        argv += ["--metrics-bind-address", "127.0.0.1:10249"]
        self._process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append((time.time(), line))

    def wait_for(self, words: str, after: float = 0.0, seconds: float = 120.0) -> float:
        """When a line with these words came."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            for when, line in list(self.lines):
                if when >= after and words in line:
                    return when
            time.sleep(0.01)
        raise SystemExit(f"no line says {words!r}:\n" + "".join(line for _, line in self.lines[-20:]))

    def memory(self, what: str) -> float:
        """MB, now (`VmRSS`) or at most (`VmHWM`)."""
        text = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(rf"{what}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]

    def cpu(self) -> float:
        """Seconds of user and system time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait(30)

    def settled(self, since: float, quiet: float = 2.0) -> tuple[int, float]:
        """Number of syncs that wrote since a time, and when the last one ended; after so many seconds without another."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            times = [when for when, line in list(self.lines) if when >= since and "synced IPv4" in line]
            if times and time.time() - times[-1] > quiet:
                return len(times), times[-1]
            time.sleep(0.05)
        raise SystemExit("the proxy did not come to rest after the changes")
