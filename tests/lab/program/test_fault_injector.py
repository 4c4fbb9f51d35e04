"""Faults that end while something refuses their end, and what the start of a lab tells."""

import os

import pytest

from narthex.lab.program.daemon import StartProgress
from narthex.lab.program.fault_injector import FaultInjector
from narthex.lab.program.state import LabError


class SlowApi:
    """An API server that comes back at the second attempt."""

    def __init__(self, error):
        self.calls = []
        self._errors = [error]

    def set_up(self, up):
        self.calls.append(up)
        if up and self._errors:
            raise self._errors.pop()


@pytest.mark.parametrize(
    "error", [LabError("it ended"), OSError(9, "Bad file descriptor")], ids=lambda each: type(each).__name__
)
def test_the_end_of_a_fault_that_is_refused_is_tried_again(error):
    api, now = SlowApi(error), [0.0]
    injector = FaultInjector(dict, api.set_up, lambda _fault, _started: None, lambda: now[0])
    injector.start({"kind": "api", "seconds": 20})
    now[0] = 21.0
    with pytest.raises(type(error)):
        injector.end_expired()
    assert injector._next_check() is not None
    injector.end_expired()
    assert api.calls == [False, True, True]
    assert injector._next_check() is None


def test_what_comes_after_the_start_goes_to_the_log(capsys):
    reader, writer = os.pipe()
    progress = StartProgress(writer)
    progress("it starts")
    progress.end(b"ready")
    # Another file may have this number now.
    os.dup2(reader, writer)
    try:
        progress("the API server is not ready yet")
        assert os.read(reader, 1000) == b"it starts\x1eready"
    finally:
        os.close(reader)
        os.close(writer)
    assert capsys.readouterr().out == "the API server is not ready yet\n"
