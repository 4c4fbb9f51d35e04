"""Put measured tables into the pages that speak of them.

    python benchmarks/run.py --into FOLDER
    python scripts/performance_page.py FOLDER

README has one table that compares programs, below `<!-- comparison -->`. Another page says where with `<!-- figures: NAME: words of the table's title -->`; what stands below, up to `<!-- end -->`, is replaced by the
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

PAGES = (ROOT / "docs" / "explanation" / "performance.md", ROOT / "docs" / "explanation" / "cost-model.md")
README = ROOT / "README.md"
COMPARISON = re.compile(r"(<!-- comparison -->\n).*?(<!-- end -->)", re.DOTALL)
COMPARED = (
    (
        "kube_proxy",
        "First sync, 5,000 Services x 10, mode nftables",
        "start to first sync, 5,000 Services x 10",
        "kube-proxy",
        "narthex",
    ),
    (
        "kube_proxy",
        "Processor time of the first sync, 5,000 Services x 10, mode nftables",
        "processor time of it",
        "kube-proxy",
        "narthex",
    ),
    (
        "kube_proxy",
        "One change, 5,000 Services x 10, mode nftables",
        "one change, from the API server to the kernel",
        "kube-proxy",
        "narthex",
    ),
    ("kube_proxy", "Resident memory, 5,000 Services x 10, mode nftables", "memory", "kube-proxy", "narthex"),
    ("dns", "Answers a CPU second", "DNS answers per CPU second", "knot", "narthex"),
    ("cni_add_del", "ADD, 200 pods", "network of a new pod, 200 pods on the node", "reference", "narthex, agent"),
)
"""Benchmark, begin of the table's title, what it says, and the begins of the labels of the peer and of Narthex."""
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

    if table := comparison(found):
        README.write_text(COMPARISON.sub(lambda match: match[1] + table + match[2], README.read_text()))
    for page in PAGES:
        page.write_text(MARKER.sub(fill, page.read_text()))
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


def comparison(found: dict[str, Saved]) -> str:
    """Return the table that compares Narthex with other programs; empty unless all its benchmarks were run."""
    lines = [_line(["what", "other program", "Narthex", "command"]), _line(["---"] * 4)]
    for name, title, what, peer, own in COMPARED:
        tables = [each for each in found[name].tables if each.title.startswith(title)] if name in found else []
        if not tables:
            return ""
        rows = [next(row for row in tables[0].rows if row.label.startswith(begin)) for begin in (peer, own)]
        theirs, ours = (f"{number(row.median)} {tables[0].unit}" for row in rows)
        other = "reference plugins" if peer == "reference" else rows[0].label.partition(",")[0]
        lines.append(_line([what, f"{other}: {theirs}", ours, f"`benchmarks/{name}.py`"]))
    return "\n".join(lines) + "\n"


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
