"""What the page is asked in the tests: questions about every dump of the test data, and the examples of the gallery."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DUMPS = ROOT / "tests" / "dumps"
GALLERY = ROOT / "playground" / "gallery"
_DESTINATIONS = (
    re.compile(r"-d (\d+\.\d+\.\d+\.\d+)/32\b[^\n]{0,300}? --dport (\d+)"),
    re.compile(r"(\d+\.\d+\.\d+\.\d+)[ :.]{1,3}(?:tcp[ .]+)?(?:dport )?(\d{2,5})\b"),
)
_SENDERS = ("outside", "10.244.1.9", "192.0.2.7")


def questions(text: str, most: int = 3) -> list[tuple[str, str]]:
    """Senders and destinations for a dump: destinations that it names, and one that it need not know."""
    found = dict.fromkeys(f"{a}:{p}" for each in _DESTINATIONS for a, p in each.findall(text) if 0 < int(p) < 65536)
    asked = [*list(found)[: most - 1], "10.96.0.1:443"]
    return [(_SENDERS[number % len(_SENDERS)], destination) for number, destination in enumerate(asked)]


def examples() -> list[dict[str, Any]]:
    """The examples as requests, with their files."""
    found = []
    for example in json.loads((GALLERY / "gallery.json").read_text()):
        files = [(name, (GALLERY / name).read_text()) for name in example["files"]]
        found.append({**example, "files": files})
    return found


def requests() -> list[dict[str, Any]]:
    """All questions, as the page asks them."""
    asked = []
    for dump in sorted(DUMPS.iterdir()):
        content = dump.read_bytes().decode(errors="replace")
        for source, destination in questions(content):
            asked.append({"source": source, "destination": destination, "options": {}, "files": [(dump.name, content)]})
    names = ("source", "destination", "options", "files")
    return [*asked, *({name: example[name] for name in names} for example in examples())]
