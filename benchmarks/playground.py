"""The playground in headless Chromium: the time until it is ready from a cold cache, and that of a trace through a dump of 5,000 rules.

    make playground; python benchmarks/playground.py [--quick] [--rounds 5] [--json FILE]

Each round is a browser with a new profile, so that nothing is cached. Times are the page's own (`performance.now()`): from the
navigation until the page accepts a request, and from the request to its answer in all formats. Bars: 4 s and 3 s.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from frame import big_dump
from frame.report import Report, parser
from narthex.trace.program.playground import playground

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chromium import Browser, browser

_RULES = 5000
_WATCH = """
const [done] = arguments, root = document.documentElement;
const look = () => root.dataset.ready ? done(performance.now()) : setTimeout(look, 5);
look();
"""
_TRACE = """
const [request, done] = arguments, begin = performance.now();
window.narthex.trace(request).then(({status}) => done([performance.now() - begin, status]), error => done([0, String(error)]));
"""


def measure(address: str, request: dict[str, object]) -> tuple[float, float]:
    """Return the seconds until the page is ready and those of a trace, in a new browser."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as session:
        return _seconds(session, address, request)


def _seconds(session: Browser, address: str, request: dict[str, object]) -> tuple[float, float]:
    session.open(address)
    ready = session.ask("POST", "/execute/async", {"script": _WATCH, "args": []})
    traced, status = session.ask("POST", "/execute/async", {"script": _TRACE, "args": [request]})
    if status not in (0, 3):
        raise RuntimeError(f"the trace failed: {status}")
    return ready / 1000, traced / 1000


def main() -> int:
    """Measure and judge."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    last = big_dump.cluster_ip(big_dump.save_services(_RULES, 3) - 1)
    dump = "".join(f"{line}\n" for line in big_dump.save_lines(_RULES, 3))
    request = {"source": "10.128.0.1", "destination": f"{last}:80", "options": {}, "files": [["rules.txt", dump]]}
    report = Report("playground", asked)
    with playground() as address:
        found = [measure(address, request) for _ in range(1 if asked.quick else asked.rounds)]
    times = report.table("The playground in headless Chromium", unit="s")
    times.row("ready, from a cold cache", [ready for ready, _ in found], most=4.0)
    times.row(f"a packet through {_RULES:,} rules", [traced for _, traced in found], most=3.0)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
