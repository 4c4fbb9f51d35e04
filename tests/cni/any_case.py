"""Keys of a configuration in another case, which Go's encoding/json matches as well."""

from collections.abc import Callable
from typing import Any

from narthex.cni.keys import MATCHED_KEYS

CASES: tuple[Callable[[str], str], ...] = (str.upper, str.lower, str.swapcase, lambda key: key[:1].upper() + key[1:])


def changed(value: Any, case: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [changed(one, case) for one in value]
    if isinstance(value, dict):
        return {case(key) if key in MATCHED_KEYS else key: changed(one, case) for key, one in value.items()}
    return value
