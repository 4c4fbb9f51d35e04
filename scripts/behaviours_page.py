"""Write docs/reference/behaviours.md: the numbered behaviours, their sources, and the tests that show them.

The behaviours stand in docs/reference/behaviours.txt. Tests name rows with the marker `row`, scenarios with `source: rows`.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "reference" / "behaviours.txt"
PAGE = LIST.with_suffix(".md")
NUMBER = r"\d{1,2}\.\d{1,2}|[A-Z]\d{1,2}"
MAX_NAMES = 3
HEAD = """\
# Behaviours

Code, tests, and documents cite single behaviours by number: "row 7.3". This page lists all of them, with the upstream source
that defines each one. [Differences](differences.md) says where Narthex behaves differently and why. Groups 1 to 27 describe
kube-proxy, group 29 what Narthex does better, and group 30 the end-to-end tests of Kubernetes. *Tests* names scenarios (files
in `tests/scenarios`) and test files.

`scripts/behaviours_page.py` generates this page from `behaviours.txt`.
"""


class Behaviour(NamedTuple):
    """One numbered behaviour."""

    number: str
    modes: str
    text: str
    source: str


def behaviours() -> dict[str, list[Behaviour]]:
    """Return all behaviours by the title of their group, in order."""
    groups: dict[str, list[Behaviour]] = {}
    title = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("## "):
            title = line[3:]
        elif line and not line.startswith("#"):
            number, modes, text, source = line.split(" | ")
            groups.setdefault(title, []).append(Behaviour(number, modes, text, source))
    return groups


def tests() -> dict[str, list[str]]:
    """Return the names of the scenarios and test files that show each row."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests" / "scenarios").glob("*.yaml")):
        source = re.search(r"^source: rows? (.*)$", path.read_text(), re.MULTILINE)
        for number in re.findall(NUMBER, source[1]) if source else ():
            found[number].append(path.stem)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for marker in re.findall(r"mark\.row\(([^)]*)\)", path.read_text()):
            for number in re.findall(rf'"({NUMBER})"', marker):
                found[number].append(path.relative_to(ROOT / "tests").as_posix())
    return {number: list(dict.fromkeys(names)) for number, names in found.items()}


def page() -> str:
    """Return the text of the page."""
    shown = tests()
    lines = [HEAD]
    for title, rows in behaviours().items():
        lines += [f"## {title}", "", "| # | Modes | Behaviour | Source | Tests |", "| --- | --- | --- | --- | --- |"]
        for row in rows:
            names = shown.get(row.number, [])
            more = f", {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            listed = ", ".join(f"`{name}`" for name in names[:MAX_NAMES]) + more
            lines.append(f"| {row.number} | {row.modes} | {row.text} | {row.source} | {listed} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    sys.stdout.write(page()) if sys.argv[1:] == ["-"] else PAGE.write_text(page())
