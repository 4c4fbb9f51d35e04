"""Options and checks that commands of several products share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

output_option = click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Output format."
)
master_option = click.option(
    "--master", default="", metavar="URL", help="URL of the API server; overrides the kubeconfig."
)


def _known_lab(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Return the name of a lab; for `--lab` without a name, that of the only one."""
    if value != "":
        return value
    from narthex.lab.program.state import existing

    labs = existing()
    if len(labs) == 1:
        return labs[0]
    raise click.UsageError(f"which lab? Name it with --lab: {', '.join(labs)}" if labs else "--lab: there is no lab")


def _labs(_ctx: click.Context, _param: click.Parameter, begin: str) -> list[str]:
    """Return the labs whose names a shell completes."""
    from narthex.lab.program.state import existing

    return [name for name in existing() if name.startswith(begin)]


class _LabOption(click.Option):
    """`--lab [NAME]`: a word behind it that another argument of the command needs is not its name."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser try again without a name if the first try leaves an argument without a value."""
        super().add_to_parser(parser, ctx)
        parse = parser.parse_args
        arguments = [each for each in ctx.command.params if isinstance(each, click.Argument)]
        expected = [each.name for each in arguments if each.nargs == 1]

        def parse_args(args: list[str]) -> Any:
            """Parse again without the word after `--lab` if an argument is missing otherwise."""
            given = list(args)
            found = parse(list(given))
            if all(isinstance(found[0].get(name), str) for name in expected):
                return found
            return parse(list(_without_name(given)))

        parser.parse_args = parse_args


def _without_name(args: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command line; a `--lab` in front of a word that is no lab has no name."""
    from narthex.lab.program.state import existing

    for number, arg in enumerate(args):
        named = arg != "--lab" or args[number + 1 : number + 2] == [] or args[number + 1] in existing()
        yield arg if named else "--lab="


lab_option = click.option(
    "--lab",
    cls=_LabOption,
    shell_complete=_labs,
    metavar="[NAME]",
    is_flag=False,
    flag_value="",
    callback=_known_lab,
    help="A running lab, with its live nodes and objects. Default of NAME: the only lab.",
)
netns_option = click.option("--netns", metavar="NAME", help="Named network namespace instead of the current one.")


def with_options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds several options, shown in this order."""

    def decorate(function: F) -> F:
        """Add the options, so that the first one is printed first in the help text."""
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


def require_followed_source(kubeconfig: str, other: object) -> None:
    """Check what a command that follows a cluster was given, before it starts.

    Raises UsageError if nothing says which cluster and the command runs in no Pod, and ClickException if the kubeconfig
    cannot be read: a wrong path does not mend itself.
    """
    if not (kubeconfig or other or os.environ.get("KUBERNETES_SERVICE_HOST")):
        raise click.UsageError(
            "no source of objects: use --kubeconfig, --master, or --manifests (not running in a Pod)"
        )
    from narthex.kube.access import AccessError, read_kubeconfig

    try:
        if kubeconfig:
            read_kubeconfig(Path(kubeconfig).expanduser())
    except AccessError as error:
        from narthex.runtime.logs import printable

        raise click.ClickException(printable(str(error))) from error
