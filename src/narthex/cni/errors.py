"""Errors as the CNI specification numbers them."""

from __future__ import annotations

INCOMPATIBLE_VERSION = 1
UNSUPPORTED_FIELD = 2
UNKNOWN_CONTAINER = 3
INVALID_ENVIRONMENT = 4
IO_FAILURE = 5
DECODING_FAILURE = 6
INVALID_CONFIG = 7
INVALID_NAMESPACE = 8
"""Not of the specification: the reference library's number for a network namespace that cannot be used."""
TRY_AGAIN = 11
CANNOT_ADD = 50
CANNOT_ADD_AND_LIMITED = 51
"""Pods that exist may have limited connectivity, too."""
TAKEN = 100
"""Plugins' own numbers begin here: an address or a host port that somebody else holds, or an attachment that exists."""
NOT_AS_ADDED = 101
"""CHECK found a difference."""
OTHER = 999
"""What the reference plugins say for anything else."""


class CniError(Exception):
    """A request that fails: a number of the specification, what happened, and what helps."""

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def to_json(self, version: str) -> dict[str, object]:
        """The object that goes to standard output."""
        said: dict[str, object] = {"cniVersion": version, "code": self.code, "msg": self.message}
        if self.details:
            said["details"] = self.details
        return said
