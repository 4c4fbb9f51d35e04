"""Put measured tables into the pages that speak of them.

    python benchmarks/run.py --into FOLDER
    python scripts/performance_page.py FOLDER

A page says where with `<!-- figures: NAME: words of the table's title -->`; what stands below, up to `<!-- end -->`, is replaced by the
tables of benchmark NAME whose titles hold those words. A marker whose benchmark is not in the folder keeps what it has.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from frame.report import Saved, TableData, number  # noqa: E402
from run import read  # noqa: E402

PAGES = (
    ROOT / "README.md",
    ROOT / "docs" / "explanation" / "performance.md",
    ROOT / "docs" / "explanation" / "cost-model.md",
)
MARKER = re.compile(r"(<!-- figures: ([a-z_]+): ([^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Fill all pages; 1 when a marker fits no table of its benchmark."""
    found = read(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results")
    wrong = []

    def fill(match: re.Match[str]) -> str:
        head, name, words, end = match.groups()
        if name not in found:
            return match[0]
        tables = [table for table in found[name].tables if words in table.title]
        if not tables:
            wrong.append(f"{name} has no table with {words!r} in its title")
            return match[0]
        return head + "\n".join(markdown(found[name], table) for table in tables) + end

    for page in PAGES:
        page.write_text(MARKER.sub(fill, page.read_text()))
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def markdown(saved: Saved, table: TableData) -> str:
    """Return a table as Markdown."""
    floor = f", beside {table.floor}" if table.floor else ""
    speed = f"speed {1 / saved.slowness:.2f} of the reference"
    ratios = any(row.ratio for row in table.rows)
    bars = any(row.bar for row in table.rows)
    head = ["what", "median", "least to most", *(["ratio"] if ratios else []), *(["bar"] if bars else [])]
    lines = [f"{table.title}{floor} ({speed}):", "", _line(head), _line(["---"] * len(head))]
    for row in table.rows:
        spread = f"{number(row.least)} to {number(row.most)}" if row.count > 1 else ""
        told = f"{row.label} ({row.note})" if row.note else row.label
        cells = [told, f"{number(row.median)} {table.unit}", spread]
        cells += [f"{row.ratio:.2f}" if row.ratio else ""] if ratios else []
        judged = {True: ", met", False: ", **missed**", None: ""}[row.met]
        cells += [f"{row.bar}{judged}"] if bars else []
        lines.append(_line(cells))
    return "\n".join([*lines, "", ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
