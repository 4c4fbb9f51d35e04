"""Write docs/reference/debug-commands.md, what commands of tutorials show in a lab: `python scripts/debug_commands_page.py`.

It is made of tests/lab/debug_commands/walks.yaml, which tests compare with labs.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.debug_commands.walks import PAGE, page  # noqa: E402

if __name__ == "__main__":
    PAGE.write_text(page())
