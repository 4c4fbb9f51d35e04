"""Options and checks that commands of several products share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

output_option = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
master_option = click.option(
    "--master", default="", metavar="URL", help="URL of the API server; overrides the kubeconfig."
)


def with_options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options, shown in this order."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def require_followed_source(given: object) -> None:
    """Raise UsageError for a command that follows a cluster if nothing says which, and it runs in no Pod."""
    if not (given or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise click.UsageError(
            "no source of objects: use --kubeconfig, --master, or --manifests (not running in a Pod)"
        )


def require_kubeconfig(path: str) -> None:
    """Raise ClickException if a kubeconfig is given that cannot be read: a wrong path does not mend itself."""
    from narthex.kube.access import AccessError, read_kubeconfig

    try:
        if path:
            read_kubeconfig(Path(path).expanduser())
    except AccessError as error:
        from narthex.runtime.logs import printable

        raise click.ClickException(printable(str(error))) from error
