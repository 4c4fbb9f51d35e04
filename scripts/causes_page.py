"""Write docs/reference/causes/README.md, the list of all causes, from the table in the code: `python scripts/causes_page.py`.

With `-` the page is printed instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from narthex.trace.causes.catalogue import CAUSES, GROUPS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "causes" / "README.md"
HEAD = """# Why not: the causes

If a path fails, `narthex trace` prints the first cause with its evidence and advice, and then other findings. A cause is
*certain* if nothing else explains what is known, otherwise *likely*. Each has a page, and a test that creates the fault. The list
is in the order in which a packet meets them; `scripts/causes_page.py` writes it.
"""


def text() -> str:
    """Return the page as text."""
    parts = [HEAD]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n\n| cause | what is wrong |\n| --- | --- |\n")
        parts += [f"| [{name}]({name}.md) | {CAUSES[name].title} |\n" for name in names]
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(text(), end="")
    else:
        PAGE.write_text(text())
