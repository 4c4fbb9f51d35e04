"""All benchmarks, one after the other: `make bench`.

    sudo python benchmarks/run.py [--quick] [--only NAME ...] [--into FOLDER] [--compare FOLDER] [--list]

Each runs as a process of its own and prints as it goes. Afterwards FOLDER (benchmarks/results/COMMIT) holds NAME.json for each, an
SVG picture for each table, and index.html with all of them. If a program that a benchmark needs is missing, it is named, and the
other benchmarks run. One table with all figures follows, and what became worse or better since the newest results of another commit,
or since those in the folder that `--compare` names. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import NamedTuple

from frame.history import changes, folder_of, previous, read
from frame.plot import plot
from frame.report import number
from frame.summary import summary

HERE = Path(__file__).parent
RESULTS = HERE / "results"


class Benchmark(NamedTuple):
    """One program beside this one."""

    name: str
    about: str
    needs: tuple[str, ...] = ()
    """Programs of others."""


BENCHMARKS = (
    Benchmark("cold_sync", "first load and one change by size, in every mode", ("nft", "iptables-restore")),
    Benchmark("nft_load", "nftables elements beside nft -f", ("nft",)),
    Benchmark("one_change", "one endpoint of a big cluster, beside the bare tools", ("nft", "iptables-restore")),
    Benchmark("api_list", "lists, decode and first sync from an API server", ("nft",)),
    Benchmark("kube_proxy", "start, one change, processor, and memory beside a real kube-proxy", ("nft", "kube-proxy")),
    Benchmark("capacity", "a node's start, processor time, and memory for 1,000 to 50,000 Services", ("nft",)),
    Benchmark("connect", "connect latency through a Service by size", ("nft",)),
    Benchmark("throughput", "bytes through a Service beside the direct path", ("nft",)),
    Benchmark("churn", "an hour of changes, sped up: processor and memory", ("nft",)),
    Benchmark("node_memory", "a node with all parts and its DNS worker: resident memory", ("nft", "openssl")),
    Benchmark("memory_profile", "bytes for each Service and endpoint, by table"),
    Benchmark("userspace_relay", "the relay beside the direct path"),
    Benchmark("dns", "answers a second beside an echo loop and knot", ("dnsperf", "knotd")),
    Benchmark("cni_add_del", "a pod's network beside the reference plugins", ("/usr/lib/cni/bridge",)),
    Benchmark("lab_start", "a lab up to its first answer, and down, beside the bare network"),
    Benchmark("repair", "Services answer again after others removed the rules", ("nft", "iptables-restore")),
    Benchmark("failover", "a load balancer's address moves to another node"),
    Benchmark(
        "playground", "the built page in headless Chromium: ready, and a trace through 5,000 rules", ("chromedriver",)
    ),
    Benchmark("trace_dump", "a dump of 200,000 rules read, and a packet traced through it"),
    Benchmark("kubectl_trace", "kubectl narthex trace to a broken Service, beside its calls of kubectl", ("kubectl",)),
    Benchmark("check", "5,000 Services compared with the rules of a node"),
    Benchmark("proof", "the rules of 5,000 and 44,000 Services proved for all packets"),
    Benchmark("proof_change", "one change of 5,000 Services proved before it is written"),
    Benchmark("count_connections", "new connections read from the kernel's counters", ("nft",)),
    Benchmark("hashing", "consistent hashing: time, evenness, and clients that move"),
    Benchmark("ejection", "slow connections with a black hole among ten endpoints"),
    Benchmark("least_connections", "open connections by endpoint, at random and with the least of two"),
    Benchmark("socket_balancing", "socket load balancing: loads, changes, connects, streams", ("nft",)),
    Benchmark("cost_model", "what grows with what, on paper and measured"),
)


def main() -> int:
    """Run what was asked for."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="small sizes and few rounds; only ratios are judged")
    options.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in BENCHMARKS])
    options.add_argument("--into", type=Path, metavar="FOLDER", help="default: benchmarks/results/COMMIT")
    options.add_argument("--compare", type=Path, metavar="FOLDER")
    options.add_argument("--list", action="store_true", help="say what there is")
    asked = options.parse_args()
    chosen = [each for each in BENCHMARKS if not asked.only or each.name in asked.only]
    if asked.list:
        print("\n".join(f"{each.name:18}{each.about}" for each in chosen))
        return 0
    into: Path = asked.into or folder_of(RESULTS)
    into.mkdir(parents=True, exist_ok=True)
    began, ended = time.monotonic(), {}
    for place, each in enumerate(chosen, 1):
        print(
            f"\n=== {place} of {len(chosen)}, {time.monotonic() - began:.0f} s: {each.name}: {each.about}", flush=True
        )
        ended[each.name] = _run(each, into, asked.quick)
    write_pictures(into)
    found = read(into)
    print("", *summary(found.values()), sep="\n")
    print(f"\n{into / 'index.html'} shows all of it, after {time.monotonic() - began:.0f} s")
    before = asked.compare or previous(RESULTS, into)
    if before is not None:
        print(f"\nSince {before.name}:")
        print("\n".join(map(str, changes(read(before), found))) or "nothing changed by more than chance")
    for name, how in ended.items():
        if how:
            print(f"{name}: {how}", file=sys.stderr)
    return 1 if any(ended.values()) else 0


def _run(each: Benchmark, into: Path, quick: bool) -> str:
    """Run one; what went wrong, empty when nothing did."""
    missing = [program for program in each.needs if not shutil.which(program)]
    if missing:
        return f"was not run: it needs {', '.join(missing)}"
    argv = [sys.executable, str(HERE / f"{each.name}.py"), "--json", str(into / f"{each.name}.json")]
    source = str(HERE.parent / "src")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(HERE), os.environ.get("PYTHONPATH", "")])}
    status = subprocess.run([*argv, *(["--quick"] if quick else [])], env=environment, check=False).returncode
    return {0: "", 1: "missed a bar"}.get(status, f"ended with status {status}")


def write_pictures(folder: Path) -> None:
    """An SVG for each table, and a page of all."""
    page = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Narthex: benchmarks</title>",
        "<meta name='viewport' content='width=device-width'>",
        "<style>:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem}img{width:100%;height:auto}</style><h1>Narthex: benchmarks</h1>",
    ]
    for name, saved in read(folder).items():
        machine = saved.machine
        about = f"{machine.processors} processors ({machine.model}), Linux {machine.kernel}, Python {machine.python}"
        page.append(f"<h2>{escape(name)}</h2><p>{escape(about)}, speed {1 / saved.slowness:.2f} of the reference</p>")
        for place, table in enumerate(saved.tables, 1):
            file = f"{name}-{place}.svg"
            (folder / file).write_text(plot(table))
            figures = "; ".join(f"{row.label}: {number(row.median)} {table.unit}" for row in table.rows)
            page.append(f"<p><img src='{escape(file)}' alt='{escape(table.title)}: {escape(figures)}'></p>")
    (folder / "index.html").write_text("\n".join(page) + "</html>\n")


if __name__ == "__main__":
    sys.exit(main())
