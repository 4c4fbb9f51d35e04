"""Kernel settings that plugins want, in the network namespace of the calling thread."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from narthex.cni.wishes import Setting


def apply(settings: Iterable[Setting]) -> None:
    """Write settings. One that is not required may be missing or refused: without IPv6 there is none to make.

    Raises OSError with the setting's path.
    """
    for setting in settings:
        path = f"/proc/sys/{setting.path}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # What is so already may not be writable, and costs others of the namespace nothing.
                if os.read(descriptor, 64).strip().decode() != setting.value:
                    os.pwrite(descriptor, setting.value.encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            if setting.required:
                raise OSError(error.errno, f"cannot set {setting.path} to {setting.value}: {error.strerror}") from None
