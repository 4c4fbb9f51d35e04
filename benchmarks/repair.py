"""How long Services do not answer after another program removed the proxy's rules, and what /healthz says meanwhile.

    sudo python benchmarks/repair.py [--quick] [--mode MODE ...] [--rounds 3] [--json FILE]

`narthex proxy` as a process, an API server in another, and a loop that keeps one core busy. A client connects to three Services
again and again. A row is the time from the end of the other program's command to the first moment at which all three answer.
Every command runs twice in a round, since a second repair must not wait longer than the first. The floor is the time in which the
kernel's own tool loads the same rules. Needs root. Works in a network namespace of its own.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from frame.proxy import Proxy
from frame.report import Report, Row, Table, parser
from frame.server import Server
from narthex.linux.namespaces import create_namespace, delete_namespace, in_namespace
from narthex.linux.run import run

HEALTH = "127.0.0.1:10256"
PATIENCE = 0.05
"""Seconds until a connect counts as not answered: the precision of the figures."""
REST = 4.0
"""Seconds between two commands."""
LONGEST = 60.0
MOST_SECONDS, MEDIAN_SECONDS, TOOL_SLACK, HEALTH_SECONDS = 1.5, 0.5, 2.0, 1.0


class Mode(NamedTuple):
    """A mode with the size that it is measured at, and the commands that remove its rules."""

    services: int
    save: tuple[str, ...]
    load: tuple[str, ...]
    commands: tuple[str, ...]


MODES = {
    "nftables": Mode(
        5000,
        ("nft", "list", "table", "ip", "narthex"),
        ("nft", "-f", "-"),
        ("nft flush ruleset", "nft flush chain ip narthex nat-output", "nft flush map ip narthex services"),
    ),
    "iptables": Mode(
        2000, ("iptables-save",), ("iptables-restore",), ("iptables -t nat -F", "iptables -t nat -F KUBE-SERVICES")
    ),
}


def main() -> int:
    """Measure and print."""
    options = parser(__doc__)
    options.add_argument("--mode", action="append", choices=MODES)
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    report = Report("repair", asked)
    for name in asked.mode or MODES:
        mode = MODES[name]
        services = mode.services // 10 if asked.quick else mode.services
        with _cluster(name, services) as (namespace, health):
            _measure(report, name, namespace, health, services, asked.rounds)
    return report.end()


@contextmanager
def _cluster(mode: str, services: int) -> Iterator[tuple[str, list[tuple[float, int]]]]:
    """A node with rules for so many Services; its namespace, and what /healthz answers from now on."""
    namespace = f"nxbench-{os.getpid()}-repair"
    create_namespace(namespace)
    ended = threading.Event()
    health: list[tuple[float, int]] = []
    try:
        run(["ip", "link", "set", "lo", "up"], namespace=namespace)
        run(["ip", "route", "add", "10.64.0.0/10", "dev", "lo"], namespace=namespace)
        for number in _probed(services):
            first = number * 64
            for end in range(first, first + 10):
                address = f"10.{64 + (end >> 16)}.{end >> 8 & 255}.{end & 255}/32"
                run(["ip", "address", "add", address, "dev", "lo"], namespace=namespace)
        with in_namespace(namespace), Server(services, 10) as server:
            listener = socket.create_server(("0.0.0.0", 8080), backlog=1024)
            threading.Thread(target=_accept, args=(listener,), daemon=True).start()
            proxy = Proxy(server.url, mode, health=HEALTH)
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                proxy.wait_for("ready: the first sync is done")
                threading.Thread(target=_watch_health, args=(namespace, ended, health), daemon=True).start()
                time.sleep(REST)
                yield namespace, health
            finally:
                ended.set()
                busy.kill()
                busy.wait()
                proxy.end()
                listener.close()
    finally:
        delete_namespace(namespace)


def _probed(services: int) -> tuple[int, ...]:
    return 0, services // 2, services - 1


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            listener.accept()[0].close()
        except OSError:
            return


def _watch_health(namespace: str, ended: threading.Event, health: list[tuple[float, int]]) -> None:
    with in_namespace(namespace):
        while not ended.wait(0.02):
            try:
                with urllib.request.urlopen(f"http://{HEALTH}/healthz", timeout=10) as answer:
                    health.append((time.monotonic(), answer.status))
            except urllib.error.HTTPError as error:
                health.append((time.monotonic(), error.code))


def _measure(
    report: Report, name: str, namespace: str, health: list[tuple[float, int]], services: int, rounds: int
) -> None:
    mode = MODES[name]
    saved = run([*mode.save], namespace=namespace)
    title = f"{name}, {services:,} x 10, beside one busy core"
    table = report.table(
        f"Without an answer after another program's command, {title}", unit="s", floor=" ".join(mode.load)
    )
    floor = _floor(table, namespace, mode, saved)
    taken: dict[tuple[str, int], list[float]] = {}
    wrong: list[float] = []
    for _ in range(rounds):
        for command in mode.commands:
            for turn in (1, 2):
                run(command.split(), namespace=namespace)
                outage = _outage(namespace, services)
                taken.setdefault((command, turn), []).append(outage)
                time.sleep(0.2)
                wrong.append(_healthy_in(health, time.monotonic() - 0.2 - outage, time.monotonic() - 0.2))
                time.sleep(REST)
    most = MOST_SECONDS if name == "nftables" else max(_values(floor)) + TOOL_SLACK
    for (command, turn), seconds in taken.items():
        table.row(f"{command}{', again' if turn == 2 else ''}", seconds, floor=floor)
    every = [second for seconds in taken.values() for second in seconds]
    table.row("median of all", statistics.median(every), most=MEDIAN_SECONDS if name == "nftables" else most)
    table.row("longest of all", max(every), most=most)
    health_table = report.table(f"/healthz is 200 while Services do not answer, {title}", unit="s")
    health_table.row("longest", max(wrong), most=HEALTH_SECONDS)


def _values(row: Row) -> tuple[float, ...]:
    return row.least, row.most


def _floor(table: Table, namespace: str, mode: Mode, saved: str) -> Row:
    """Load the same rules with the kernel's own tool, in a namespace of their own."""
    seconds = []
    for turn in range(3):
        other = f"{namespace}-{turn}"
        create_namespace(other)
        try:
            start = time.perf_counter()
            run([*mode.load], stdin=saved, namespace=other)
            seconds.append(time.perf_counter() - start)
        finally:
            delete_namespace(other)
    return table.row(" ".join(mode.load), seconds)


def _outage(namespace: str, services: int) -> float:
    """Seconds until all probed Services answer."""
    begin = time.monotonic()
    with in_namespace(namespace):
        while not all(_answers(f"10.110.{number >> 8}.{number & 255}") for number in _probed(services)):
            if time.monotonic() - begin > LONGEST:
                raise SystemExit(f"Services did not answer again within {LONGEST:g} s")
    return time.monotonic() - begin


def _answers(address: str) -> bool:
    with socket.socket() as sock:
        sock.settimeout(PATIENCE)
        try:
            sock.connect((address, 80))
        except OSError:
            return False
        return True


def _healthy_in(health: list[tuple[float, int]], begin: float, end: float) -> float:
    """Return the longest time within an outage in which every answer of /healthz was 200."""
    longest, since = 0.0, begin
    for when, status in health:
        if begin <= when <= end:
            if status == 200:
                longest = max(longest, when - since)
            else:
                since = when
    return longest


if __name__ == "__main__":
    sys.exit(main())
