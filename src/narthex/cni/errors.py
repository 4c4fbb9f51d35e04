"""Error codes of the CNI specification."""

from __future__ import annotations

INCOMPATIBLE_VERSION = 1
UNSUPPORTED_FIELD = 2
UNKNOWN_CONTAINER = 3
INVALID_ENVIRONMENT = 4
DECODING_FAILURE = 6
INVALID_CONFIG = 7
INVALID_NAMESPACE = 8
"""Not in the specification: the reference library's code for an unusable network namespace."""
TRY_AGAIN = 11
CANNOT_ADD = 50
TAKEN = 100
"""First code for plugins: an address or a host port is in use, or the attachment exists."""
NOT_AS_ADDED = 101
"""CHECK found a difference."""
OTHER = 999
"""The reference plugins' code for any other error."""


class CniError(Exception):
    """A failed request: code, message, and details that help to fix it."""

    def __init__(self, code: int, message: str, details: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def to_json(self, version: str) -> dict[str, object]:
        """Return the error object for standard output."""
        error: dict[str, object] = {"cniVersion": version, "code": self.code, "msg": self.message}
        if self.details:
            error["details"] = self.details
        return error
