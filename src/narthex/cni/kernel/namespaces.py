"""What a pod's network namespace needs besides links: kernel settings, and the name of the boot that it belongs to."""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from narthex.cni.plan import SysctlSetting

_BOOT = "/proc/sys/kernel/random/boot_id"


def boot() -> str:
    """The name of this run of the kernel: no namespace outlives it."""
    with open(_BOOT) as file:  # noqa: PTH123
        return file.read().strip()


def apply_settings(settings: Iterable[SysctlSetting]) -> None:
    """Write settings. One that is not required may be missing or refused: without IPv6 there is none to make.

    Raises OSError with the setting's path.
    """
    for setting in settings:
        path = f"/proc/sys/{setting.path}"
        try:
            descriptor = posix.open(path, posix.O_RDWR | posix.O_CLOEXEC)
            try:
                # What is so already may not be writable, and costs others of the namespace nothing.
                if posix.read(descriptor, 64).strip().decode() != setting.value:
                    posix.pwrite(descriptor, setting.value.encode(), 0)
            finally:
                posix.close(descriptor)
        except OSError as error:
            if setting.required:
                raise OSError(error.errno, f"cannot set {setting.path} to {setting.value}: {error.strerror}") from None
