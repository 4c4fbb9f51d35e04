"""Settings for all tests."""

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.coverage_table import note_rows, write

SEED = os.environ.get("NARTHEX_SEED")
"""Set by `make fuzz`. Without it, every run draws the same examples, so that no run fails by chance."""
settings.register_profile(
    "narthex",
    deadline=None,
    derandomize=SEED is None,
    database=None,
    print_blob=SEED is not None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("narthex")
HERE = Path(__file__).parent
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background lets them ignore it, and so would all that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Thousands of tests are made while they are collected, and all of them stay: looking for garbage among them over and over
# takes half of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, but not among the tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A packet is no name: it is unreadable, and where it holds a random number, the processes that share a test run
    would not agree on the tests that there are. None leaves it to pytest."""
    return argname if isinstance(val, bytes) and not (val.isascii() and val.decode().isprintable()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without root, kernel tests are left out on a desk; in CI their absence must be seen as a failure."""
    items.sort(key=_turn)
    for item in items:
        note_rows(item)
    if os.geteuid() == 0 or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="needs root: run `sudo make test`"))


_TURNS = {"uml": 4, "kernel": 1, "laws": 2}


def _turn(item: pytest.Item) -> int:
    """Those that wait for silences first, while the other kernel (tests/uml) is at work; then other long ones, so that at
    the end nobody waits for one. What that kernel told by then is passed on last."""
    folders = item.path.relative_to(HERE).parts
    if item.path.stem == "test_scenarios" and "kernel" in folders:
        return 0
    return next((turn for folder, turn in _TURNS.items() if folder in folders), 3)


def note_failed_tests(terminalreporter: Any) -> None:
    """Write the IDs of failed tests where scripts/run_tests.py looks for them."""
    file = os.environ.get("NARTHEX_FAILED_TESTS")
    failed = [report.nodeid for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, ())]
    if file and failed:
        Path(file).write_text("".join(f"{test}\n" for test in dict.fromkeys(failed)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which behaviour rows this run covered, and which tests needed a second boot of the other kernel."""
    note_failed_tests(terminalreporter)
    write(terminalreporter)
    again = [
        (report.nodeid, value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "second boot"
    ]
    if again:
        terminalreporter.section("the second kernel broke down and was booted once more")
        for why in dict.fromkeys(value for _, value in again):
            names = [name for name, value in again if value == why]
            terminalreporter.write_line(f"for {len(names)} tests, {names[0]} the first:\n{why}")


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with a file under tests/golden; `UPDATE_GOLDEN=1` writes it instead."""

    def check(name: str, text: str) -> None:
        path = HERE / "golden" / name
        if os.environ.get("UPDATE_GOLDEN"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert text == path.read_text(), f"{name} differs; look at the change, then run with UPDATE_GOLDEN=1"

    return check


@pytest.fixture(autouse=True)
def usual_log() -> Iterator[None]:
    """Undo what a test did to the log: pytest attaches its handler once more to a logger that does not propagate."""
    yield
    logger = logging.getLogger("narthex")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
