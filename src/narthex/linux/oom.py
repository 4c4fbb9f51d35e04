"""How soon the kernel ends this process when memory runs out."""

from __future__ import annotations

from pathlib import Path

_OWN = Path("/proc/self/oom_score_adj")


def set_oom_score(score: int, path: Path = _OWN) -> None:
    """-1000 is never, 1000 is first. Raises OSError; to go below the present value takes CAP_SYS_RESOURCE."""
    path.write_text(f"{score}\n")
