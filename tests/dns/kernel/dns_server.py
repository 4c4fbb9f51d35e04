"""`narthex dns` as a process in a namespace of its own, and other people's programs that ask it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import CommandError, run
from narthex.testing.load import until

SOURCE = Path(__file__).parents[3] / "src"
PATIENCE = 60.0
ADDRESSES = ("10.96.0.10", "fd6e::a", "192.0.2.53")
COREFILE = """
.:53 {
    errors
    health {
        lameduck 0s
    }
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
    }
    prometheus 127.0.0.1:9153
    loadbalance
    reload 2s 1s
}
"""


class DnsServer:
    """Make it, `start` it, and `end` it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.namespace = f"nxdns-{os.getpid()}-{name}"
        self.folder = folder
        self.manifests = folder / "manifests"
        self.manifests.mkdir()
        self.corefile = folder / "Corefile"
        self.corefile.write_text(COREFILE)
        self.log_path = folder / "log"
        self.process: Any = None
        create_namespace(self.namespace)
        run(["ip", "link", "set", "lo", "up"], namespace=self.namespace)
        for address in ADDRESSES:
            bits = ["/128", "nodad"] if ":" in address else ["/32"]
            run(["ip", "address", "add", address + bits[0], "dev", "lo", *bits[1:]], namespace=self.namespace)

    def start(self, *flags: str) -> "DnsServer":
        flags = flags or (f"--manifests={self.manifests}", "--workers=2")
        argv = [sys.executable, "-m", "narthex", "dns", f"--conf={self.corefile}", *flags]
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with self.log_path.open("wb") as log, in_namespace(self.namespace):
            self.process = subprocess.Popen(argv, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        delete_namespace(self.namespace)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def workers(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in found.split()]

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        def holds() -> Any:
            assert self.process.poll() is None, f"the server ended:\n{self.log}"
            return condition()

        until(holds, what, PATIENCE, lambda: self.log)

    def ready(self) -> "DnsServer":
        self.wait(lambda: "answering at" in self.log, "the first answer")
        return self

    def run(self, *argv: str) -> str:
        return run(list(argv), namespace=self.namespace)

    def http(self, port: int, path: str) -> tuple[int, str]:
        """Status and body."""
        try:
            said = self.run("curl", "-s", "-w", "%{http_code}", f"http://127.0.0.1:{port}{path}")
        except CommandError:
            return 0, ""
        return int(said[-3:]), said[:-3]

    def dig(self, name: str, type_: str = "A", *more: str, server: str = ADDRESSES[0]) -> list[str] | None:
        """`dig +short`, sorted; None when nobody answers."""
        try:
            said = self.run("dig", f"@{server}", name, type_, "+short", "+time=5", "+tries=2", *more)
        except CommandError:
            return None
        return sorted(line for line in said.splitlines() if not line.startswith(";"))
