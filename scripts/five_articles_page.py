"""Write docs/tutorial/five-articles.md and its Chinese version: `python scripts/five_articles_page.py`.

They are made of tests/lab/debug_commands/articles.yaml, whose commands tests type in labs of all modes.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.lab.debug_commands.articles import EN, ZH, page  # noqa: E402

if __name__ == "__main__":
    for language in (EN, ZH):
        language.page.write_text(page(language))
