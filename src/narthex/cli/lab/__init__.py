"""`narthex lab` and its subcommands: the options and the error handling that they share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from narthex.cli.options import with_options
from narthex.lab.program.labs import DEFAULT_NAME
from narthex.lab.program.state import LabError

external_options = with_options(
    click.option(
        "--control-plane",
        metavar="DIR",
        type=click.Path(path_type=Path),
        help="Directory with etcd, kube-apiserver, kube-controller-manager, and kube-scheduler, which then replace the lab's own "
        "API server, controllers, and scheduler.",
    ),
    click.option(
        "--kube-proxy",
        metavar="PATH",
        type=click.Path(path_type=Path),
        help="A kube-proxy that the nodes run, in the mode of --mode, instead of their own proxy.",
    ),
)
"""Official programs in the place of the lab's own parts."""
name_option = click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the lab.")


def report_lab_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Convert a LabError to an error message and exit status 1."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        """Call the command; print a `LabError` as one line instead of a traceback."""
        try:
            function(*args, **kwargs)
        except LabError as error:
            raise click.ClickException(str(error)) from None

    return wrapped


def name_argument(name: str) -> str:
    """Return ` --name NAME` for use in printed commands, empty for the default lab."""
    return "" if name == DEFAULT_NAME else f" --name {name}"
