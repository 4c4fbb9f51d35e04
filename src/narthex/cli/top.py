"""`narthex top`: new connections of Services and endpoints, as counted by the kernel."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from narthex.cli.inputs import cluster_of, has_source, no_namespace, node_of_lab, source_options
from narthex.cli.options import lab_option, netns_option, output_option
from narthex.cli.output import json_text, working
from narthex.model import InputError, Snapshot, visible
from narthex.trace.names import AddressNames
from narthex.trace.program.inputs import ClusterObjects
from narthex.trace.program.reports import look, look_at_bundle, names_of
from narthex.trace.reports.counting import CounterReading, TopDocument, TopRow, ordered, rows

if TYPE_CHECKING:
    from rich.table import Table

_SORTS = ("rate", "total", "name")


@click.command()
@source_options
@click.option(
    "--bundle", type=click.Path(exists=True, path_type=Path), help="Bundle of a node, for its counters at that time."
)
@lab_option
@click.option("--node", default="", metavar="NAME", help="With --lab: the node. Default: the only one.")
@netns_option
@click.option("--sort", type=click.Choice(_SORTS), default="rate", show_default=True, help="Sort order.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Interval between readings.",
)
@click.option("--once", is_flag=True, help="Print one table from two readings.")
@click.option("--services", is_flag=True, help="Show only Service ports, without their endpoints.")
@output_option
def command(
    bundle: Path | None,
    lab: str | None,
    netns: str | None,
    sort: str,
    interval: float,
    once: bool,
    services: bool,
    output: str,
    **given: Any,
) -> None:
    """Show new connections per second of each Service port and endpoint, for any proxy on this node.

    The counters are those of iptables rules, nftables elements or IPVS, and of socket load balancing; without any, the connection table is
    used. The first line says which. `ejected` marks endpoints that sockets of this node avoid, since connections failed.

    --manifests, --kubeconfig or --master add names that the rules lack. In a terminal the table is updated continuously; the keys r, t
    and n sort by rate, total and name, q quits.

    \b
        narthex top
        narthex top --once -o json
    """
    cluster: ClusterObjects | None = cluster_of(given, pods=True) if has_source(given) else None
    if lab is not None:
        if cluster is not None or bundle is not None or netns is not None:
            raise click.UsageError("a lab has its own nodes and objects: omit other sources")
        netns, cluster = node_of_lab(lab, given["node"])
    snapshot = cluster.snapshot if cluster is not None else Snapshot()
    names, addresses = names_of(snapshot), AddressNames(snapshot)

    def table(now: CounterReading, before: CounterReading | None, seconds: float, by: str) -> tuple[TopRow, ...]:
        """Return the sorted rows with names of pods; with `--services`, without the rows of endpoints."""
        found = ordered(rows(now, before, seconds), by)
        named = (msgspec.structs.replace(row, name=addresses.of(_address(row.endpoint))) for row in found)
        return tuple(row for row in named if not (services and row.endpoint))

    try:
        if bundle is not None:
            now = look_at_bundle(bundle, names)
            click.echo(_shown(now, table(now, None, 0.0, sort), output), nl=False)
            return
        _live(lambda: look(names, netns), table, sort, interval, once, output)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise no_namespace(netns, error) from error
    except KeyboardInterrupt:
        return


_Table = Callable[[CounterReading, CounterReading | None, float, str], tuple[TopRow, ...]]


def _live(
    looking: Callable[[], CounterReading], table: _Table, sort: str, interval: float, once: bool, output: str
) -> None:
    with working("reading counters"):
        before, at = looking(), time.monotonic()
    if not once and output == "text" and sys.stdout.isatty():
        _screen(looking, table, sort, interval, before, at)
        return
    while True:
        time.sleep(interval)
        now, then = looking(), time.monotonic()
        click.echo(_shown(now, table(now, before, then - at, sort), output), nl=False)
        if once:
            return
        before, at = now, then


def _screen(
    looking: Callable[[], CounterReading], table: _Table, sort: str, interval: float, before: CounterReading, at: float
) -> None:
    """Show a table that is updated until q or Ctrl-C."""
    from rich.live import Live

    with Keys() as keys, Live(_rich(before, table(before, None, 0.0, sort)), screen=True, auto_refresh=False) as screen:
        now, rate_from, seconds = before, before, 0.0
        while True:
            pressed = keys.wait(interval)
            if pressed == "q":
                return
            chosen = next((each for each in _SORTS if pressed and each[0] == pressed), "")
            if chosen:
                sort = chosen
            else:
                rate_from, now, then = now, looking(), time.monotonic()
                seconds, at = then - at, then
            screen.update(_rich(now, table(now, rate_from if seconds else None, seconds, sort)), refresh=True)


def _rich(counts: CounterReading, found: tuple[TopRow, ...]) -> Table:
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(f"from {counts.source}"), title_justify="left", expand=True)
    for head, justify in (("Service port", "left"), ("endpoint", "left"), ("new/s", "right"), ("connections", "right")):
        made.add_column(head, justify="right" if justify == "right" else "left")
    for row in found:
        cells = _cells(row)
        made.add_row(*(Text(visible(each)) for each in cells), style="" if row.endpoint else "bold")
    return made


def _cells(row: TopRow) -> tuple[str, str, str, str]:
    rate = "" if row.per_second is None else f"{row.per_second:.1f}"
    where = f"{row.endpoint} ({row.name})" if row.name else row.endpoint
    where += " ejected" if row.ejected else ""
    return ("" if row.endpoint else row.service or "(no name)", where, rate, str(row.connections))


def _shown(counts: CounterReading, found: tuple[TopRow, ...], output: str) -> str:
    if output == "json":
        return json_text(TopDocument(source=counts.source, sampled=counts.sampled, rows=found))
    cells = [("SERVICE PORT", "ENDPOINT", "NEW/S", "CONNECTIONS"), *map(_cells, found)]
    wide = [max(len(each[column]) for each in cells) for column in range(4)]
    lines = [f"from {counts.source}"]
    for one, two, three, four in cells:
        lines.append(f"{one:{wide[0]}}  {two:{wide[1]}}  {three:>{wide[2]}}  {four:>{wide[3]}}".rstrip())
    return "".join(f"{visible(line)}\n" for line in lines) + "\n"


def _address(endpoint: str) -> str:
    return endpoint.rpartition(":")[0].strip("[]")


class Keys:
    """Reads keys while it is open; without a terminal on the standard input there are none."""

    def __init__(self) -> None:
        """Create a reader; it changes the terminal only while it is open."""
        self._before: list[object] | None = None

    def __enter__(self) -> Keys:
        """Switch a terminal to single keys."""
        if sys.stdin.isatty():
            self._before = list(termios.tcgetattr(sys.stdin))
            tty.setcbreak(sys.stdin)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the terminal."""
        if self._before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> str:
        """Return the next key within some seconds; empty if there is none."""
        if self._before is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
