"""The log of the loop, with debug messages."""

import logging

import pytest


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "narthex")
    return caplog
