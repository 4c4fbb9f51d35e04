"""Going first, where that is allowed."""

import os

import pytest

from narthex.linux.privileges import go_first


@pytest.mark.parametrize(("refused", "goes"), [(None, True), (PermissionError(1, "Operation not permitted"), False)])
def test_it_is_asked_for_and_may_be_refused(monkeypatch, refused, goes):
    asked = []

    def nice(steps):
        asked.append(steps)
        if refused:
            raise refused

    monkeypatch.setattr(os, "nice", nice)
    assert go_first() is goes
    assert asked == [-10]
