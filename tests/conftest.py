"""Settings for all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

from coverage_table import note_rows, write

settings.register_profile(
    "narthex", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("narthex")


def pytest_collection_modifyitems(items):
    """Without root, kernel tests are left out on a desk; in CI their absence must be seen as a failure."""
    for item in items:
        note_rows(item)
    if os.geteuid() == 0 or os.environ.get("CI"):
        return
    for item in items:
        if item.get_closest_marker("kernel"):
            item.add_marker(pytest.mark.skip(reason="needs root: run `sudo make test`"))


def pytest_terminal_summary(terminalreporter):
    """Which rows of the behaviour list this run has shown."""
    write(terminalreporter)
