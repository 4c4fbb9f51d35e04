"""libnftables by ctypes: runs nft text in this process."""

from __future__ import annotations

import ctypes
import threading
from functools import lru_cache

from narthex.linux.namespaces import in_namespace

_TERSE = 1 << 11
# The library keeps tables of names that all contexts share.
_one_at_a_time = threading.Lock()
_NAMES = ("libnftables.so.1", "libnftables.so")


class NftError(RuntimeError):
    """nft refused the text; the message is nft's."""


class NftMissingError(RuntimeError):
    """libnftables is not installed."""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    for name in _NAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        context, text = ctypes.c_void_p, ctypes.c_char_p
        library.nft_ctx_new.restype, library.nft_ctx_new.argtypes = context, [ctypes.c_uint32]
        library.nft_ctx_free.argtypes = [context]
        library.nft_ctx_buffer_output.argtypes = [context]
        library.nft_ctx_buffer_error.argtypes = [context]
        library.nft_ctx_get_output_buffer.restype, library.nft_ctx_get_output_buffer.argtypes = text, [context]
        library.nft_ctx_get_error_buffer.restype, library.nft_ctx_get_error_buffer.argtypes = text, [context]
        library.nft_ctx_output_set_flags.argtypes = [context, ctypes.c_uint]
        library.nft_run_cmd_from_buffer.argtypes = [context, text]
        return library
    raise NftMissingError("libnftables.so.1 is not installed: install the package libnftables1")


def run_nft(text: str, namespace: str | None = None, terse: bool = False) -> str:
    """Run nft commands as one transaction and return their output; `terse` omits the elements of sets.

    A context lasts for one call: it opens its netlink socket in the namespace, and its cache of large rulesets is
    freed. Raises NftError, NftMissingError, FileNotFoundError (no such namespace), and ValueError for text with NUL.
    """
    if "\0" in text:
        raise ValueError("nft text must not hold NUL")
    with _one_at_a_time, in_namespace(namespace):
        context = _context()
        try:
            if terse:
                _library().nft_ctx_output_set_flags(context, _TERSE)
            return _run(context, text)
        finally:
            _library().nft_ctx_free(context)


class OwnedTables:
    """Tables with `flags owner`: others cannot change them, and they end with the process (Linux 5.12)."""

    def __init__(self, text: str) -> None:
        """Load the tables in the network namespace of the calling thread. Raises NftError, NftMissingError."""
        with _one_at_a_time:
            self._context: int | None = _context()
            try:
                _run(self._context, text)
            except BaseException:
                self._free()
                raise

    def run(self, text: str) -> None:
        """Run commands, which may change the tables. Raises NftError."""
        with _one_at_a_time:
            if self._context is not None:
                _run(self._context, text)

    def close(self) -> None:
        """Remove the tables. May be called again."""
        with _one_at_a_time:
            self._free()

    def _free(self) -> None:
        if self._context is not None:
            _library().nft_ctx_free(self._context)
            self._context = None


def _context() -> int:
    library = _library()
    context: int | None = library.nft_ctx_new(0)
    if not context:
        raise NftError("libnftables could not make a context")
    library.nft_ctx_buffer_output(context)
    library.nft_ctx_buffer_error(context)
    return context


def _run(context: int, text: str) -> str:
    library = _library()
    failed = library.nft_run_cmd_from_buffer(context, text.encode())
    said = (library.nft_ctx_get_error_buffer(context) or b"").decode("utf-8", "replace")
    if failed:
        raise NftError(said.strip() or "nft failed and did not say why")
    return (library.nft_ctx_get_output_buffer(context) or b"").decode("utf-8", "replace")
