"""`--version`: the versions of the program, of Python, of the kernel, and of the tools that the modes use."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterator
from typing import TypeVar

import click

import narthex

F = TypeVar("F", bound=Callable[..., object])

TOOLS = ("nft", "iptables", "ipset", "conntrack")
_SECONDS = 5.0
_VERSION = re.compile(r"\bv?(\d+\.\d+[\w.+-]*)(?: \((nf_tables|legacy)\))?")


def version_option(function: F) -> F:
    """Add `--version` to a command."""
    text = "Show the version, and those of Python, the kernel, and the tools, and exit."
    show = click.option("--version", is_flag=True, is_eager=True, expose_value=False, help=text, callback=_show)
    return show(function)


def _show(context: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo("\n".join(_lines()))
        context.exit()


def _lines() -> Iterator[str]:
    kernel = platform.uname()
    yield f"narthex, version {narthex.__version__}"
    yield f"Python {platform.python_version()}"
    yield f"{kernel.system} {kernel.release} {kernel.machine}"
    for tool in TOOLS:
        yield f"{tool} {_tool_version(tool)}"


def _tool_version(tool: str) -> str:
    from narthex.linux.run import CommandError, TimeoutExpired, run

    try:
        text = run([tool, "--version"], timeout=_SECONDS)
    except FileNotFoundError:
        return "not found"
    except (CommandError, OSError, TimeoutExpired) as error:
        # ipset prints its version and then fails if the user may not ask the kernel for its protocol.
        text = str(error)
    found = _VERSION.search(text)
    if found is None:
        return "of unknown version"
    return f"{found[1]} ({found[2]})" if found[2] else found[1]
