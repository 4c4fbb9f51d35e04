"""The table at the end of a run: which rows of the behaviour list were shown, by mode and by witness.

Rows come from scenarios (`source: rows 9.1, 9.2; …`) and from the marker `row`. Only tests that passed count. What no
test of the run shows is named below the table, with the reason where the project has written one down.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from narthex.proxy.backends import BACKENDS
from narthex.testing.scenario import Scenario

HERE = Path(__file__).parent
MODES = tuple(BACKENDS)
OWN_KERNELS = ("nftables", "iptables")
"""Modes that a test means when it names none."""
WITNESSES = ("plan", "rules", "kernel")
LAST = {1: 18, 2: 15, 3: 11, 4: 12, 5: 11, 6: 9, 7: 10, 8: 5, 9: 18, 10: 14, 11: 5, 12: 5, 13: 8, 14: 8, 15: 9}
LAST |= {16: 12, 17: 9, 18: 11, 19: 9, 20: 25, 21: 20, 22: 9, 23: 10, 24: 14, 25: 14, 26: 7, 27: 27, 29: 16}
"""The last row of each group that a node proxy of these modes has to do with."""

_PROPERTY = "rows"
_SOURCE = re.compile(r"^source: rows ([0-9., ]+)", re.MULTILINE)
_ROW = re.compile(r"(?<![0-9.])(\d{1,2}\.\d{1,2})(?![0-9.])")


def note_rows(item: Any) -> None:
    """Give a collected test its rows, modes and witness; they travel with its report, also between processes."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    scenario = params.get("scenario")
    rows = [number for marker in item.iter_markers("row") for number in marker.args]
    if isinstance(scenario, Scenario):
        rows += _rows_of(scenario.path)
    if not rows:
        return
    words = [value for value in params.values() if isinstance(value, str)]
    modes = [word for word in words if word in MODES] or [mode for mode in MODES if mode in item.nodeid]
    modes = modes or list(OWN_KERNELS)
    on_kernel = item.get_closest_marker("kernel") is not None
    witness = "kernel" if on_kernel else next((word for word in words if word in WITNESSES), "rules")
    item.user_properties.append((_PROPERTY, [sorted(set(rows)), modes, witness]))


@cache
def _rows_of(path: str) -> tuple[str, ...]:
    found = _SOURCE.search(Path(path).read_text())
    return tuple(_ROW.findall(found[1])) if found else ()


def write(reporter: Any) -> None:
    """Print the table; nothing when the run had no row."""
    shown: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for report in reporter.stats.get("passed", ()):
        for name, value in report.user_properties:
            if name == _PROPERTY:
                rows, modes, witness = value
                for row in rows:
                    shown[row].update((mode, witness) for mode in modes)
    if not shown:
        return
    reporter.section("rows covered, by mode and witness")
    columns = [(mode, witness) for mode in MODES for witness in WITNESSES]
    reporter.write_line(f"{'':9} {'rows':>4} {'shown':>6}" + "".join(f"   {mode:^20}" for mode in MODES))
    witnesses = " ".join(f"{each:>6}" for each in WITNESSES)
    reporter.write_line(f"{'':9} {'':>4} {'':>6}" + f"   {witnesses}" * len(MODES))
    missing: list[str] = []
    for group, last in LAST.items():
        rows = [f"{group}.{number}" for number in range(1, last + 1)]
        missing += [row for row in rows if row not in shown]
        counts = [f"{sum(column in shown.get(row, ()) for row in rows):>6}" for column in columns]
        some = sum(row in shown for row in rows)
        line = "".join("   " + " ".join(counts[at : at + 3]) for at in range(0, len(counts), len(WITNESSES)))
        reporter.write_line(f"group {group:<3} {last:>4} {some:>6}{line}")
    total = sum(LAST.values())
    reporter.write_line(f"{'all':9} {total:>4} {total - len(missing):>6}")
    others = sorted((row for row in shown if _order(row)[1] not in LAST), key=_order)
    reporter.write_line(f"other rows shown: {', '.join(others) or 'none'}")
    reasons, alike = _reasons(), defaultdict(list)
    for row in missing:
        alike[reasons.get(row, "no test of this run is marked with it")].append(row)
    for reason, rows in alike.items():
        reporter.write_line(f"not shown in this run ({reason}): {', '.join(rows)}")


def _order(row: str) -> tuple[str, int, int]:
    """Rows of other lists, `D12` of DNS, say, have a letter instead of a group."""
    if lettered := re.fullmatch(r"([A-Z]+)(\d+)", row):
        return lettered[1], 0, int(lettered[2])
    group, _, number = row.partition(".")
    return "", int(group), int(number)


def _reasons() -> dict[str, str]:
    """Why a row is not to be seen in packets, or is done otherwise, as far as that is written down."""
    reasons = {}
    index = (HERE / "scenarios/README.md").read_text().partition("## Index of rows")[2]
    for line in index.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 3 and _ROW.fullmatch(cells[0]) and cells[2] != "packets":
            reasons[cells[0]] = cells[2]
    differences = (HERE.parent / "docs/reference/differences.md").read_text()
    for line in differences.splitlines():
        for row in _ROW.findall(line) if line.startswith("|") else ():
            reasons.setdefault(row, "see docs/reference/differences.md")
    return reasons
