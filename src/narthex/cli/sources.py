"""Options that say what is known of nodes: bundles, dumps, this node; shared by trace, check, top and diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from narthex.cli.inputs import cluster_of, has_source
from narthex.netfilter.dump.read import DumpError
from narthex.trace.follow.views import NodeView
from narthex.trace.program.bundle_reading import BundleError
from narthex.trace.program.inputs import ClusterObjects
from narthex.trace.program.known import from_bundles, from_files, live

F = TypeVar("F", bound=Callable[..., object])


def node_options(function: F) -> F:
    """`--bundle`, `--rules`, `--live`, `--netns`; to be read by `views_of`."""
    decorators = (
        click.option(
            "--bundle",
            "bundles",
            multiple=True,
            type=click.Path(exists=True, path_type=Path),
            help="What `narthex bundle` took of a node, and of its cluster perhaps; one for each node.",
        ),
        click.option(
            "--rules",
            "dumps",
            multiple=True,
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="What a tool of the node printed; repeatable.",
        ),
        click.option("--live", is_flag=True, help="This node, as it is now; the default without --bundle and --rules."),
        click.option(
            "--netns", metavar="NAME", help="A named network namespace instead of the present one, for --live."
        ),
    )
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def views_of(
    options: dict[str, Any], *, default_live: bool = True
) -> tuple[tuple[NodeView, ...], ClusterObjects | None]:
    """Views of all sources that were named, and the cluster's objects, of --manifests or the API first and of a bundle
    else. Ends the command when one cannot be read."""
    try:
        views, cluster = from_bundles(options["bundles"])
        if options["dumps"]:
            views = (*views, from_files(options["dumps"], str(options.get("node", "")) if not views else ""))
        if options["live"] or (default_live and not views):
            views = (*views, live(str(options.get("node", "")), options.get("netns")))
    except (BundleError, DumpError) as error:
        raise click.ClickException(str(error)) from error
    except (FileNotFoundError, PermissionError, ValueError) as error:
        raise no_namespace(options.get("netns"), error) from error
    if has_source(options):
        cluster = cluster_of(options, pods=True)
    return views, cluster


def no_namespace(name: str | None, error: Exception) -> click.ClickException:
    """Why a network namespace cannot be looked into."""
    if isinstance(error, FileNotFoundError):
        return click.ClickException(f"there is no network namespace {name}")
    why = "it takes root" if isinstance(error, PermissionError) else str(error)
    return click.ClickException(f"the network namespace {name} cannot be entered: {why}")
