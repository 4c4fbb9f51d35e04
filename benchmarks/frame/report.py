"""Tables of a benchmark: printed while it runs, saved as JSON, judged by their bars.

    options = parser(__doc__)
    asked = options.parse_args()
    report = Report("nft_load", asked)
    table = report.table("Loading 5,000 Services x 10", unit="s", floor="nft -f of the bare elements")
    floor = table.row("nft -f", [1.11, 1.13, 1.10])
    table.row("ours, apply", [0.61, 0.60, 0.66], floor=floor, most_ratio=1.5)
    return report.end()

A figure is the median of its values, printed with the spread. `floor` is the limit: the least that the same work can cost. `peer` is
another program that does the same. A ratio is of medians, to the floor if there is one, else to the peer. Bars are of two kinds:
`most_ratio` and `least_ratio`, which hold on any machine, and `most` and `least`, in the table's unit, for a machine of speed 1 (see
`yardstick`): bars of times grow with the machine's slowness, and are not judged with `--quick`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from .machine import Machine, describe
from .yardstick import slowness

_TIMES = ("s", "ms", "us")


class Row(msgspec.Struct, kw_only=True):
    """One figure."""

    label: str
    median: float
    least: float
    most: float
    count: int
    """Of values."""
    size: float = 0.0
    """Where it stands on the horizontal axis of a plot; 0: nowhere."""
    series: str = ""
    """Which line of a plot it is a point of; empty: the label's."""
    limit: float = 0.0
    """The floor's median; 0: it has no floor."""
    peer: float = 0.0
    """The peer's median; 0: it has no peer."""
    ratio: float = 0.0
    """To the floor, else to the peer; 0: it has neither."""
    bar: str = ""
    """In words."""
    met: bool | None = None
    """None: no bar, or one that is not judged here."""
    note: str = ""


class TableData(msgspec.Struct, kw_only=True):
    """A table as it is saved."""

    title: str
    unit: str
    floor: str
    axis: str
    """What `size` counts; empty: there is nothing to plot by size."""
    rows: list[Row]


class Saved(msgspec.Struct, kw_only=True):
    """A whole file."""

    benchmark: str
    machine: Machine
    slowness: float
    """When it began; 1 is the reference machine."""
    quick: bool
    tables: list[TableData]


class Table:
    """Rows of one unit."""

    def __init__(self, data: TableData, slow: float, quick: bool) -> None:
        self.data = data
        self._slow = slow
        self._quick = quick

    def row(
        self,
        label: str,
        values: Sequence[float] | float,
        *,
        floor: Row | None = None,
        peer: Row | None = None,
        most_ratio: float | None = None,
        least_ratio: float | None = None,
        most: float | None = None,
        least: float | None = None,
        size: float = 0.0,
        series: str = "",
        note: str = "",
    ) -> Row:
        """Add a figure and print it. Raises ValueError when there are no values."""
        measured = [values] if isinstance(values, float | int) else list(values)
        if not measured:
            raise ValueError(f"{label}: nothing was measured")
        row = Row(
            label=label,
            median=statistics.median(measured),
            least=min(measured),
            most=max(measured),
            count=len(measured),
            limit=floor.median if floor is not None else 0.0,
            peer=peer.median if peer is not None else 0.0,
            size=size,
            series=series or label,
            note=note,
        )
        base = row.limit or row.peer
        row.ratio = row.median / base if base else 0.0
        time = self.data.unit in _TIMES
        bars = [
            (most_ratio, row.ratio, "ratio at most", 1.0, False, True),
            (least_ratio, row.ratio, "ratio at least", 1.0, False, False),
            (most, row.median, "at most", self._slow if time else 1.0, time, True),
            (least, row.median, "at least", 1.0, time, False),
        ]
        for bar, value, words, grows, is_time, upper in bars:
            if bar is None:
                continue
            unit = f" {self.data.unit}" if "ratio" not in words else ""
            row.bar += f"{', ' if row.bar else ''}{words} {number(bar * grows)}{unit}"
            if not (is_time and self._quick):
                good = value <= bar * grows if upper else value >= bar
                row.met = good and row.met is not False
        self.data.rows.append(row)
        print(line(row, self.data.unit), flush=True)
        return row


class Report:
    """All tables of one benchmark."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self._file: Path | None = asked.json
        self.saved = Saved(benchmark=name, machine=describe(), slowness=slowness(), quick=asked.quick, tables=[])
        speed = 1 / self.saved.slowness
        print(f"{name}: {self.saved.machine.processors} processors, speed {speed:.2f} of the reference", flush=True)

    def table(self, title: str, *, unit: str, floor: str = "", axis: str = "") -> Table:
        """Begin a table."""
        data = TableData(title=title, unit=unit, floor=floor, axis=axis, rows=[])
        self.saved.tables.append(data)
        beside = f"; floor: {floor}" if floor else ""
        print(f"\n{title}{beside}", flush=True)
        # The machine may have become slower meanwhile.
        self.saved.slowness = max(self.saved.slowness, slowness())
        return Table(data, self.saved.slowness, self.saved.quick)

    def end(self) -> int:
        """Save what was asked to be saved; the exit status: 1 when a bar is missed."""
        if self._file is not None:
            self._file.write_bytes(msgspec.json.format(msgspec.json.encode(self.saved)))
        missed = [(table, row) for table in self.saved.tables for row in table.rows if row.met is False]
        for table, row in missed:
            figure = f"{number(row.median)} {table.unit}, ratio {row.ratio:.2f}"
            print(f"MISSED {table.title}: {row.label}: {figure}; the bar is {row.bar}", file=sys.stderr)
        return 1 if missed else 0


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes and few rounds; only ratios are judged")
    made.add_argument("--json", type=Path, metavar="FILE", help="save the tables there")
    return made


def line(row: Row, unit: str) -> str:
    """A row as text."""
    spread = f" ({number(row.least)} to {number(row.most)}, {row.count} values)" if row.count > 1 else ""
    ratio = f"  ratio {row.ratio:.2f}" if row.ratio else ""
    bar = f"  [{row.bar}{'' if row.met is None else ': met' if row.met else ': MISSED'}]" if row.bar else ""
    note = f"  {row.note}" if row.note else ""
    return f"  {row.label:44} {number(row.median):>10} {unit}{spread}{ratio}{bar}{note}"


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
