"""One table of all figures that have a limit, a peer, or a bar: what, limit, peer, Narthex, ratio, bar."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .report import Row, Saved, TableData, number

_WIDTH = 80


def summary(saved: Iterable[Saved]) -> Iterator[str]:
    """Yield the lines of the table, at most 80 columns wide."""
    yield f"{'what':30}{'limit':>9}{'peer':>9}{'Narthex':>10}{'ratio':>8}  bar"
    for each in saved:
        for table in each.tables:
            rows = [row for row in table.rows if row.ratio or row.met is not None]
            if rows:
                yield ""
                yield f"{each.benchmark}: {table.title} ({table.unit})"[:_WIDTH]
                yield from (_line(row, table) for row in rows)


def _line(row: Row, table: TableData) -> str:
    verdict = {None: "", True: "met", False: "MISSED"}[row.met]
    figures = f"{_optional(row.limit):>9}{_optional(row.peer):>9}{number(row.median):>10}"
    ratio = f"{row.ratio:.2f}" if row.ratio else ""
    return f"  {_label(row, table):28}{figures}{ratio:>8}  {verdict}".rstrip()


def _label(row: Row, table: TableData) -> str:
    label = row.label.removeprefix(f"{table.title}: ")
    return label if len(label) <= 27 else f"{label[:26]}…"


def _optional(value: float) -> str:
    return number(value) if value else ""
