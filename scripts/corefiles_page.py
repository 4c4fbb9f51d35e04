"""Write docs/reference/corefiles.md, which Corefiles start and why others do not: `python scripts/corefiles_page.py`.

The Corefiles are those of tests/dns/clusters, reduced from what installers, clouds, and articles publish; the first line of
each names its kind. With `-` the page is printed instead.
"""

from __future__ import annotations

import sys
from pathlib import Path

from narthex.dns.corefile.parse import CorefileError, parse
from narthex.dns.corefile.syntax import CorefileReader

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "corefiles.md"
FILES = ROOT / "tests" / "dns" / "clusters"
HEAD = """# Corefiles of clusters

Which Corefiles `narthex dns` starts with, and why not with others. Each row is a Corefile in `tests/dns/clusters`, reduced from
what an installer, a cloud, or an article publishes. `scripts/corefiles_page.py` writes this page, and a test checks it. What each
plugin supports is [on its own page](corefile.md).

"""


def plugins_of(text: str) -> list[str]:
    """Return the names of all plugins of a Corefile, in order."""
    reader = CorefileReader(lambda _: (), {})
    blocks = reader.read("Corefile", text)
    return list(dict.fromkeys(node.name for block in blocks for node in block.children or ()))


def verdict(text: str) -> tuple[bool, str]:
    """Return whether a Corefile starts, and its errors or warnings, without positions."""
    try:
        problems = parse(text, "Corefile", load=lambda _: ()).problems
    except CorefileError as error:
        return False, _messages([each.message for each in error.problems if each.severity == "error"])
    return True, _messages([each.message for each in problems if "no file is named" not in each.message])


def _messages(messages: list[str]) -> str:
    return "; ".join(message.partition("; known are")[0] for message in messages).replace("|", "\\|")


def text() -> str:
    """Return the page as text."""
    rows: dict[bool, list[str]] = {True: [], False: []}
    for path in sorted(FILES.iterdir()):
        content = path.read_text()
        starts, messages = verdict(content)
        kind = content.splitlines()[0].removeprefix("# ")
        rows[starts].append(f"| {path.name} | {kind} | {', '.join(plugins_of(content))} | {messages} |\n")
    both = sum(map(len, rows.values()))
    parts = [HEAD, f"{len(rows[True])} of {both} start.\n"]
    for starts, title, last in ((True, "These start", "warnings"), (False, "These do not start", "why")):
        parts.append(f"\n## {title}\n\n| Corefile | of | plugins | {last} |\n| --- | --- | --- | --- |\n")
        parts += rows[starts]
    return "".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(text(), end="")
    else:
        PAGE.write_text(text())
