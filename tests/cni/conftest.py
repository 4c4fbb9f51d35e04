"""Each network configuration of these tests is read a second time, with its keys in another case, and must mean the same."""

import json
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
from tests.cni.any_case import CASES, changed

from narthex.cni import request
from narthex.cni.errors import CniError
from narthex.cni.json import JsonError, parse


@pytest.fixture(autouse=True)
def keys_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, cases = request.configuration, cycle(CASES)

    def configuration(stdin: bytes) -> Any:
        try:
            found = parse(stdin)
        except JsonError:
            return plain(stdin)
        other = json.dumps(changed(found, next(cases))).encode()
        answer, again = outcome(plain, stdin), outcome(plain, other)
        assert again == answer
        return plain(stdin)

    monkeypatch.setattr(request, "configuration", configuration)


def outcome(read: Callable[[bytes], Any], stdin: bytes) -> Any:
    try:
        return read(stdin)
    except CniError as error:
        return str(error)
