"""Links, addresses, and routes in a network namespace, by one `ip -batch` per namespace.

A whole pod takes 3 ms; importing a netlink library takes 240 ms. Errors include the line that the kernel refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from narthex.linux.namespaces import in_namespace
from narthex.linux.run import CommandError, run

_FAILED_LINE = re.compile(r"Command failed -:(\d+)")
_SYSCTL = re.compile(r"net(/[A-Za-z0-9_.-]+)+", re.ASCII)


class LinkError(RuntimeError):
    """The kernel refused a change; the message names the namespace and the command."""


def ip_batch(namespace: str | None, commands: Sequence[str]) -> None:
    """Run `ip` commands in a namespace, in order ("link add br0 type bridge"); None is the present one.

    A command is one line and must not contain untrusted text. Stops at the first failure. Raises LinkError,
    ValueError for a command of more than one line, and FileNotFoundError without the namespace.
    """
    if not commands:
        return
    if any("\n" in command for command in commands):
        raise ValueError("an ip command must be one line")
    try:
        run(["ip", "-batch", "-"], stdin="\n".join(commands) + "\n", namespace=namespace, timeout=30)
    except CommandError as error:
        failed = _FAILED_LINE.search(error.said)
        command = commands[int(failed[1]) - 1] if failed else "\n".join(commands)
        where = f"in namespace {namespace}" if namespace else "here"
        raise LinkError(f"ip {command} ({where}): {error.said.splitlines()[0]}") from None


def set_sysctls(namespace: str | None, values: Mapping[str, str]) -> None:
    """Write kernel settings of a namespace, by their path below /proc/sys (`net/ipv4/ip_forward`).

    Settings that the kernel lacks are skipped, such as those of IPv6. Raises ValueError for a path outside `net/`,
    and OSError if the kernel refuses the value.
    """
    with in_namespace(namespace):
        for name, value in values.items():
            if not _SYSCTL.fullmatch(name) or ".." in name:
                raise ValueError(f"{name!r} is not a setting below net/")
            path = Path("/proc/sys") / name
            if path.exists():
                path.write_text(value)
