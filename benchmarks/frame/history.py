"""Results by commit: where each run is stored, which one came before, and what became slower since."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from .report import Saved

_CHANGED = 0.15
"""Medians of two runs on a quiet machine differ by less."""
_MORE_IS_BETTER = re.compile(r"/s|per s|[A-Za-z]+/s")


class ChangedFigure(NamedTuple):
    """A figure that differs between two runs."""

    name: str
    before: float
    now: float
    slower: bool

    def __str__(self) -> str:
        word = "worse" if self.slower else "better"
        return f"{word}: {self.name}: {self.before:.3g} -> {self.now:.3g} ({self.now / self.before:.2f} x)"


def folder_of(results: Path) -> Path:
    """Return the folder for the results of the commit that is checked out; `-changed` if files differ from it."""
    root = str(results.parent)
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return results / "no-commit"
    return results / (commit + ("-changed" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""))


def previous(results: Path, current: Path) -> Path | None:
    """Return the folder of the newest run before the current one, None if there is none."""
    others = [path for path in results.glob("*/") if path != current and any(path.glob("*.json"))]
    return max(others, key=_written, default=None)


def _written(folder: Path) -> float:
    return max(path.stat().st_mtime for path in folder.glob("*.json"))


def _git(root: str, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def read(folder: Path) -> dict[str, Saved]:
    """Return the results in a folder, by benchmark."""
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Saved) for path in sorted(folder.glob("*.json"))}


def changes(before: Mapping[str, Saved], now: Mapping[str, Saved]) -> list[ChangedFigure]:
    """Return the figures that differ by more than chance, those that became worse first.

    Compares ratios where there are any, and otherwise times after division by the machine's slowness.
    """
    found = []
    for name in before.keys() & now.keys():
        was = dict(_figures(before[name]))
        for key, (figure, more_is_better) in _figures(now[name]):
            old = was.get(key, (0.0, False))[0]
            if old and figure and abs(figure / old - 1) > _CHANGED:
                found.append(ChangedFigure(f"{name}: {key}", old, figure, (figure < old) is more_is_better))
    return sorted(found, key=lambda each: (not each.slower, each.name))


def _figures(saved: Saved) -> Iterator[tuple[str, tuple[float, bool]]]:
    for table in saved.tables:
        more_is_better = bool(_MORE_IS_BETTER.fullmatch(table.unit))
        for row in table.rows:
            slow = saved.slowness if table.unit in ("s", "ms", "us") else 1.0
            yield f"{table.title}: {row.label}", (row.ratio or row.median / slow, more_is_better)
