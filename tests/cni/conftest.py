"""Each network configuration of these tests is read a second time, with its keys in another case, and must mean the same."""

import json
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest

from narthex.cni import request
from narthex.cni.errors import CniError
from narthex.cni.json import JsonError, parse
from narthex.cni.keys import MATCHED_KEYS

CASES: tuple[Callable[[str], str], ...] = (str.upper, str.lower, str.swapcase, lambda key: key[:1].upper() + key[1:])


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


def changed(value: Any, case: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [changed(one, case) for one in value]
    if isinstance(value, dict):
        return {case(key) if key in MATCHED_KEYS else key: changed(one, case) for key, one in value.items()}
    return value
