"""`kubectl narthex`: the commands that explain a cluster, with the context and the permissions of the user's kubectl."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import narthex
from narthex.cli.options import with_options
from narthex.cli.output import reported_errors, working
from narthex.kube.kubectl import LISTED, Kubectl

if TYPE_CHECKING:
    from narthex.trace.program.kubectl import ClusterListing

_IMAGE = "busybox"
_NAMESPACE = "kube-system"
_FORWARDED = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}

_context_options = with_options(
    click.option("--kubeconfig", default="", metavar="FILE", help="As for kubectl."),
    click.option("--context", default="", metavar="NAME", help="As for kubectl. Default: the current context."),
    click.option("-n", "--namespace", default="", metavar="NAME", help="Namespace of names without one."),
)
_collecting_options = with_options(
    _context_options,
    click.option(
        "--image", default=_IMAGE, show_default=True, help="Image of the pod for a moment; it needs chroot and sleep."
    ),
    click.option(
        "--pod-namespace",
        default=_NAMESPACE,
        show_default=True,
        metavar="NAME",
        help="Namespace of the pod for a moment.",
    ),
    click.option("--new-pod", is_flag=True, help="Use a pod for a moment also on nodes with a pod of Narthex."),
    click.option("--dry-run", is_flag=True, help="List the objects, print what would run on nodes, and end."),
    click.option("-y", "--yes", is_flag=True, help="Do not ask. Necessary if standard input is no terminal."),
)
_words = click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS]...")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(narthex.__version__, prog_name="kubectl narthex")
def main() -> None:
    """Explain the Service network of a cluster, with the current context of kubectl.

    The state of a node comes from the pod of Narthex there. Without one, it comes from a pod that lives for a moment. What will run on
    nodes is printed first, with the permissions that it needs. Nothing is left behind.
    """


@click.command(context_settings=_FORWARDED)
@_collecting_options
@_words
def trace(words: tuple[str, ...], **given: Any) -> None:
    """Explain the path of a packet from SRC to DST, step by step, and why it fails.

    ARGUMENTS are SRC, DST, and the options of `narthex trace`, except those that name sources.

    \b
        kubectl narthex trace client web
        kubectl narthex trace shop/client shop/web:80 --all
        kubectl narthex trace outside node-1:30001 --yes -o json
    """
    with _listing(given) as listed:
        from narthex.cli.trace import command
        from narthex.trace.program.kubectl import nodes_of_path, qualified

        parsed = _parsed(command, words)
        kubectl, namespace, listing = listed()
    with reported_errors():
        ends = [qualified(parsed[name], namespace, listing.snapshot) for name in ("source", "destination")]
        if not all(ends):
            raise click.MissingParameter(param_hint="'SRC' or 'DST'", param_type="argument")
        nodes = nodes_of_path(listing, ends[0], ends[1], parsed["domain"], parsed["node"])
    renamed = dict(zip((parsed["source"], parsed["destination"]), ends, strict=True))
    _run(command, "trace", [renamed.get(word, word) for word in words], kubectl, listing, nodes, given)


@click.command(context_settings=_FORWARDED)
@_collecting_options
@_words
def check(words: tuple[str, ...], **given: Any) -> None:
    """Compare the objects of the cluster with what nodes do.

    ARGUMENTS are the options of `narthex check`, except those that name sources: --node NAME chooses a node.
    """
    with _listing(given) as listed:
        from narthex.cli.check import command

        parsed = _parsed(command, words)
        kubectl, _, listing = listed()
    _run(command, "check", words, kubectl, listing, _chosen(listing, parsed["node"]), given)


@click.command(context_settings=_FORWARDED)
@_collecting_options
@click.option("--node", default="", metavar="NAME", help="The node. Default: the only one.")
@_words
def top(words: tuple[str, ...], node: str, **given: Any) -> None:
    """Show the connections of Services and endpoints that a node has counted.

    ARGUMENTS are the options of `narthex top`, except those that name sources.
    """
    with _listing(given) as listed:
        from narthex.cli.top import command

        _parsed(command, words)
        kubectl, _, listing = listed()
    nodes = _chosen(listing, node)
    _run(command, "top", words, kubectl, listing, nodes, given)


@click.command(context_settings=_FORWARDED)
@_context_options
@_words
def why(words: tuple[str, ...], kubeconfig: str, context: str, namespace: str) -> None:
    """Explain for each address of a Service and each node why the node announces it, or does not.

    ARGUMENTS are SERVICE and the options of `narthex lb why`, except those that name sources. It lists objects, and runs nothing else.
    """
    from narthex.cli.lb import why as command
    from narthex.trace.program.kubectl import list_announcements

    service = str(_parsed(command, words)["service"])
    kubectl = Kubectl(kubeconfig, context, namespace)
    with reported_errors(), working("listing the objects"):
        text = list_announcements(kubectl)
        own = kubectl.default_namespace()
    named = f"{own}/{service}" if own and "/" not in service else service
    with tempfile.TemporaryDirectory(prefix="kubectl-narthex-") as directory:
        file = Path(directory) / "objects.json"
        file.write_text(text)
        arguments = [named if word == service else word for word in words]
        command.main([*arguments, "--manifests", str(file)], prog_name="kubectl narthex why", standalone_mode=False)


for _command in (trace, check, top, why):
    main.add_command(_command)


Listed = tuple["Kubectl", str, "ClusterListing"]
"""The program, the namespace of names without one, and the objects."""


@contextmanager
def _listing(given: dict[str, Any]) -> Iterator[Callable[[], Listed]]:
    """List the objects of the cluster while the block runs, which loads modules; the function waits for them and returns them.

    Ends the command on errors.
    """
    kubectl = Kubectl(given["kubeconfig"], given["context"], given["namespace"])
    with ThreadPoolExecutor(2) as workers:
        namespace = workers.submit(kubectl.default_namespace)
        text = workers.submit(kubectl.objects)

        def listed() -> Listed:
            """Return what was listed."""
            from narthex.trace.program.kubectl import read_listing

            with reported_errors(), working("listing the objects"):
                return kubectl, namespace.result(), read_listing(text.result())

        yield listed


_SOURCES = ("bundles", "bundle", "dumps", "live", "netns", "manifests", "master", "lab", "probe", "watch", "config")


def _parsed(command: click.Command, words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments and options of the command that does the work. Raises UsageError for those that name sources."""
    found = command.make_context(command.name, list(words)).params
    used = [name for name in _SOURCES if found.get(name)]
    if used:
        raise click.UsageError(f"--{used[0].removesuffix('s')} names a source; here the cluster is the source")
    return found


def _chosen(listing: ClusterListing, name: str) -> tuple[str, ...]:
    from narthex.trace.program.kubectl import MOST_NODES

    if name and name not in listing.nodes:
        raise click.UsageError(f"there is no node {name}; there are {', '.join(listing.nodes[:20])}")
    if not name and len(listing.nodes) > MOST_NODES:
        raise click.UsageError(f"the cluster has {len(listing.nodes)} nodes: name one with --node")
    return (name,) if name else listing.nodes


def _run(
    command: click.Command,
    name: str,
    words: Sequence[str],
    kubectl: Kubectl,
    listing: ClusterListing,
    nodes: tuple[str, ...],
    given: dict[str, Any],
) -> None:
    """Say what will run on nodes, ask, collect their state, and run the command with it; `check` and `top` with one node at a time."""
    from narthex.trace.node.collectors import collectors, intention
    from narthex.trace.node.view import UNUSED
    from narthex.trace.program.kubectl import collected, new_run

    run = new_run()
    chosen = collectors(nodes, listing.pods, run, given["pod_namespace"], new=given["new_pod"])
    text = intention(kubectl.words, LISTED, chosen, given["image"])
    if given["dry_run"]:
        click.echo(text, nl=False)
        return
    click.echo(text, nl=False, err=True)
    if not given["yes"]:
        if not sys.stdin.isatty():
            raise click.UsageError("standard input is no terminal, so the command cannot ask: add --yes, or --dry-run")
        click.confirm("Run it?", abort=True, err=True)
    # The counters of IPVS are a part that no other command reads.
    without = frozenset[str]() if name == "top" else UNUSED
    with reported_errors(), collected(kubectl, listing, chosen, run, given["image"], without) as files:
        parts = [files] if name == "trace" else [(file,) for file in files]
        status = 0
        for part, node in zip(parts, nodes, strict=False):
            if name == "top" and len(nodes) > 1 and "json" not in words:
                click.echo(f"node {node}, ", nl=False)
            options = [word for file in part for word in ("--bundle", str(file))]
            options += ["--node", node] if name == "check" and len(nodes) > 1 else []
            try:
                command.main([*words, *options], prog_name=f"kubectl narthex {name}", standalone_mode=False)
            except SystemExit as ended:
                status = max(status, int(ended.code or 0))
    raise SystemExit(status)
