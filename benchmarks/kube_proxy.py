"""Narthex beside a real kube-proxy: start, one change, processor, and memory, with the same API server.

    sudo python benchmarks/kube_proxy.py [--quick] [--kube-proxy PATH] [--size 5000x10 ...] [--mode nftables ...]

Both programs run in a network namespace of their own, one after the other, with the API server of our tests. Neither program
is asked what it did: the kernel counts the transactions of a namespace (its ruleset generation), and the benchmark reads this
number. A start ends with the last transaction before the rules rest for some seconds, and the rules must contain the last
Service then. A change begins when the API server has taken it, and ends with the last transaction that follows: iptables
commits one for each table. In iptables mode, both use the iptables of the machine; only its nf_tables variant counts
transactions, so the benchmark wants that one.

Bars, not with --quick: the first sync in half of kube-proxy's time, and a change in a tenth. With few Services, kube-proxy
starts faster, since it is compiled. kube-proxy waits a second between syncs by default
(`minSyncPeriod`), which is most of its time for one change. Needs root and a kube-proxy. Removes its namespaces.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from frame.report import Report, parser
from frame.server import Server
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.nfnetlink import NfNetlink
from narthex.linux.run import run
from narthex.testing.build import NODE

MODES = ("nftables", "iptables")
START_RATIO, CHANGE_RATIO = 0.5, 0.1
_REST = 4.0
"""Seconds without a transaction after which a start has ended; kube-proxy syncs at most once a second."""
_PAUSE = 2.0
_PATIENCE = 900.0
_POLL = 0.0005
_SOURCE = Path(__file__).parents[1] / "src"
_TICKS = os.sysconf("SC_CLK_TCK")


class Figures(NamedTuple):
    """What one run of one program took."""

    start: float
    """Seconds from the start of the process to the last transaction of the first sync."""
    cpu: float
    """Seconds of the processor until then."""
    memory: float
    """Resident MB after the changes."""
    changes: Sequence[float]
    """Seconds from each change at the API server to the kernel's transaction."""


def main() -> int:
    """Measure and print; return 1 when a bar is missed."""
    options = parser(__doc__)
    options.add_argument("--kube-proxy", default=shutil.which("kube-proxy") or "", metavar="PATH")
    options.add_argument("--size", action="append", metavar="SERVICESxENDPOINTS")
    options.add_argument("--mode", action="append", choices=MODES)
    options.add_argument("--changes", type=int, default=0)
    given = options.parse_args()
    if not given.kube_proxy:
        raise SystemExit("no kube-proxy on PATH: name one with --kube-proxy")
    sizes = [tuple(map(int, each.split("x"))) for each in given.size or (["100x8"] if given.quick else ["5000x10"])]
    version = run([given.kube_proxy, "--version"]).split()[-1]
    report = Report("kube_proxy", given)
    changes = given.changes or (3 if given.quick else 10)
    with tempfile.TemporaryDirectory() as compiled:
        _compile(compiled)
        for services, endpoints in sizes:
            for mode in given.mode or MODES:
                theirs = _measured(_kube_proxy(given.kube_proxy, mode), services, endpoints, changes)
                ours = _measured(_narthex(mode), services, endpoints, changes)
                found = {f"kube-proxy {version}": theirs, "narthex proxy": ours}
                _tell(report, f"{services:,} Services x {endpoints}, mode {mode}", found, judged=not given.quick)
    return report.end()


def _compile(folder: str) -> None:
    """Compile the modules for the processes that follow, as an installation does."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = folder
    run([sys.executable, "-m", "compileall", "-q", str(_SOURCE)])


def _tell(report: Report, what: str, found: dict[str, Figures], *, judged: bool) -> None:
    columns = (
        ("First sync", "s", lambda of: of.start, START_RATIO),
        ("Processor time of the first sync", "s", lambda of: of.cpu, None),
        ("One change", "ms", lambda of: [each * 1e3 for each in of.changes], CHANGE_RATIO),
        ("Resident memory", "MB", lambda of: of.memory, None),
    )
    for title, unit, value, bar in columns:
        table = report.table(f"{title}, {what}", unit=unit)
        (peer, theirs), (own, ours) = found.items()
        base = table.row(peer, value(theirs))
        table.row(own, value(ours), peer=base, most_ratio=bar if judged else None)


def _measured(argv: Sequence[str], services: int, endpoints: int, changes: int) -> Figures:
    name = f"nxbench-{os.getpid()}-kp"
    create_namespace(name)
    try:
        run(["ip", "link", "set", "lo", "up"], namespace=name)
        # Both programs want an address of the node's own, and a default route.
        run(["ip", "address", "add", "192.168.49.11/24", "dev", "lo"], namespace=name)
        with in_namespace(name), Server(services, endpoints) as server, tempfile.TemporaryDirectory() as folder:
            return _run(argv, server, services, changes, Path(folder))
    finally:
        delete_namespace(name)


def _run(argv: Sequence[str], server: Server, services: int, changes: int, folder: Path) -> Figures:
    netlink = NfNetlink()
    last = server_address(services - 1)
    with _process([each.format(url=server.url, folder=folder) for each in argv], folder) as process:
        begun = time.time()
        at, whole = 0.0, False
        # iptables-nft prepares a large load for minutes before its transaction.
        while not whole:
            at = _rest(netlink, process, begun, at)
            seen = netlink.generation()
            whole = last in run(["nft", "list", "ruleset"])
            if netlink.generation() != seen:
                at, whole = time.time(), False
        cpu = _cpu(process.pid)
        taken = [_change(netlink, server, process) for _ in range(changes)]
        return Figures(at - begun, cpu, _memory(process.pid), taken)


def server_address(number: int) -> str:
    """Return the cluster IP of a Service of the benchmark's API server."""
    return f"10.110.{number >> 8}.{number & 255}"


def _rest(netlink: NfNetlink, process: subprocess.Popen[bytes], begun: float, before: float = 0.0) -> float:
    """Return when the last transaction was, once none follows for a while. `before` is when one was that was not the last."""
    seen, at = netlink.generation(), before
    since = time.time()
    while not at or time.time() - max(at, since) < _REST:
        time.sleep(_POLL)
        now = netlink.generation()
        if now != seen:
            seen, at = now, time.time()
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with status {process.returncode}")
        if time.time() - begun > _PATIENCE:
            raise SystemExit(f"{process.args!r} did not come to rest in {_PATIENCE:.0f} s")
    return at


def _change(netlink: NfNetlink, server: Server, process: subprocess.Popen[bytes]) -> float:
    seen, at = netlink.generation(), 0.0
    since = server.change(1, 1000)
    # The pause also keeps the next change out of the interval that follows this one.
    while not at or time.time() - at < _PAUSE:
        time.sleep(_POLL)
        now = netlink.generation()
        if now != seen:
            seen, at = now, time.time()
        if time.time() - since > 60 or process.poll() is not None:
            raise SystemExit(f"a change did not reach the kernel through {process.args!r}")
    return max(at - since, 0.0)


def _narthex(mode: str) -> Sequence[str]:
    return [
        *(sys.executable, "-m", "narthex", "proxy", "--master", "{url}", "--hostname-override", NODE),
        *("--proxy-mode", mode, "--cluster-cidr", "10.64.0.0/12", "--healthz-bind-address", "127.0.0.1:10256"),
    ]


def _kube_proxy(program: str, mode: str) -> Sequence[str]:
    return [
        *(program, "--master", "{url}", "--hostname-override", NODE, "--proxy-mode", mode),
        *("--cluster-cidr", "10.64.0.0/12", "--healthz-bind-address", "127.0.0.1:10256"),
        # What belongs to the whole machine is left alone.
        *("--conntrack-max-per-core", "0", "--conntrack-min", "0", "--conntrack-tcp-timeout-established", "0"),
        *("--conntrack-tcp-timeout-close-wait", "0"),
    ]


@contextmanager
def _process(argv: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log) as process:
        try:
            yield process
        except BaseException:
            print((folder / "log").read_text()[-3000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # With children: both programs run iptables.
    return sum(map(int, fields[11:15])) / _TICKS


def _memory(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    sys.exit(main())
