"""`narthex diff`: differences between two bundles or texts with rules, or between two modes for the same objects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from narthex.cli.inputs import cluster_of, has_source, inputs_of, node_options_of, options_of_all_nodes, source_options
from narthex.cli.options import output_option
from narthex.cli.output import AnswersByStatus, print_document, working
from narthex.cli.proved_changes import print_changes, prove_option
from narthex.model import InputError, visible
from narthex.proxy.backends import BACKENDS
from narthex.trace.follow.views import NodeView
from narthex.trace.node.view import view_of_bundle
from narthex.trace.program.bundle import read_bundle
from narthex.trace.program.packet_sources import changes_between, rendered_rules
from narthex.trace.program.reports import prospect
from narthex.trace.program.travel import from_files, is_bundle, texts_of
from narthex.trace.proof.changes import MOST_LINES, ChangeReport
from narthex.trace.reports.difference import (
    ViewComparison,
    ViewDifference,
    diff_document,
    differences,
    of_modes,
    rules_in_text,
)
from narthex.trace.reports.migration.report import some


@click.command(cls=AnswersByStatus)
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@source_options
@options_of_all_nodes
@click.option(
    "--text",
    "as_text",
    is_flag=True,
    help="Include the lines of rules that only one side has, even without any effect.",
)
@click.option(
    "--all", "every", is_flag=True, help="Include differences that two nodes always have; with --prove: all lines."
)
@prove_option
@output_option
def command(before: str, after: str, as_text: bool, every: bool, proving: bool, output: str, **given: Any) -> None:
    """Show how two bundles differ, or two files with rules.

    A file may hold whatever `narthex trace --rules` reads: iptables-save, `iptables -S`, `nft list ruleset`, `ip route`.

    It compares what packets meet at each frontend, with exact shares and up to the endpoint or the next node, then routes, policy rules,
    links, addresses and settings. Rules with different texts and the same meaning are equal. Of two nodes, it only counts differences in
    their own addresses and pods. The last lines say what was not compared.

    With --manifests or --kubeconfig, A and B may be modes: what changes for packets, as `narthex migrate` shows it.

    With --prove, it compares the rules alone, and for all packets that open connections: each line describes packets whose outcome changes,
    and all others are proved to have the same outcome. The rules of A and B may be of different programs and layouts.

    Exit status, as for diff: 0 without differences, 1 with differences, 2 if it can't be decided.

    \b
        narthex diff yesterday.tgz today.tgz
        narthex diff --prove yesterday.tgz today.tgz --kubeconfig ~/.kube/config
        narthex diff iptables nftables --manifests DIR --node worker-a
    """
    if proving and as_text:
        raise click.UsageError("--prove and --text exclude each other")
    try:
        if proving:
            print_changes(_proved(before, after, every, given), output)
        found = _of_modes(before, after, given) if before in BACKENDS and after in BACKENDS else None
        if found is None or as_text:
            with working(f"comparing {before} and {after}"):
                (one, first), (other, second) = (_side(word, given) for word in (before, after))
                found = found or differences(one, other, folded=not every)
    except (InputError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_text:
        more = tuple(rules_in_text(first, second))
        found = msgspec.structs.replace(found, found=(*found.found, *more))
    print_document(diff_document(found), output, lambda: _text(found, every))
    sys.exit(found.status)


def _proved(before: str, after: str, every: bool, given: dict[str, Any]) -> tuple[ChangeReport, ...]:
    """Return what changes for all packets. Objects, if there are any, give names."""
    (one, _), (other, _) = (_side(word, given) for word in (before, after))
    inputs = None
    if has_source(given):
        mode = before if before in BACKENDS else ""
        inputs = inputs_of({**given, "node": given["node"] or one.node, "mode": mode})
    own = inputs.host.addresses if inputs is not None else given["node_ips"]
    with working(f"proving what changes from {before} to {after}"):
        return changes_between(one, other, inputs, own, None if every else MOST_LINES)


def _of_modes(before: str, after: str, given: dict[str, Any]) -> ViewComparison | None:
    """Return the differences between two modes, as `narthex migrate` finds them; None without objects."""
    if not has_source(given):
        return None
    cluster = cluster_of(given)
    with working(f"comparing {before} and {after}"):
        result = prospect(cluster, before, after, node_options_of(given))
    for problem in result.problems:
        click.echo(visible(problem), err=True)
    return of_modes(result.migration)


def _side(word: str, given: dict[str, Any]) -> tuple[NodeView, dict[str, str]]:
    if word in BACKENDS and has_source(given):
        rendered = rendered_rules(inputs_of({**given, "mode": word}))
        return rendered.view, {f"rules/{name}": text for name, text in rendered.texts}
    path = Path(word)
    if not path.exists():
        modes = ", ".join(BACKENDS)
        raise click.UsageError(
            f"{word!r} is not a file or bundle; with --manifests or --kubeconfig it may be a mode: {modes}"
        )
    if not is_bundle(path):
        view = from_files([path], "")
        view.origin = str(path)
        return view, dict(texts_of([path])[0])
    bundle = read_bundle(path)
    return view_of_bundle(bundle.parts, bundle.table, str(path)), bundle.parts


def _text(found: ViewComparison, every: bool) -> str:
    lines: list[str] = []
    for each in found.found:
        lines.append(f"{each.part}: {each.what}")
        lines += _sides(each)
        if each.services and each.services != ("",):
            lines.append(f"  for: {some(each.services, None if every else _SERVICES, 'more')}")
    lines += [f"cannot tell: {text}" for text in found.unknown]
    if found.folded:
        counts = ", ".join(f"{each.count} in {each.part}" for each in found.folded)
        lines.append(f"folded (own addresses and own pods of two nodes; --all shows them): {counts}")
    lines += [f"not compared: {text}" for text in found.not_compared]
    return "".join(f"{visible(line)}\n" for line in lines)


_SERVICES = 4
"""Names of Service ports that are shown of one difference."""


def _sides(each: ViewDifference) -> list[str]:
    before = [f"  - {line}" for line in (each.before or "(not there)").splitlines()]
    return before + [f"  + {line}" for line in (each.after or "(not there)").splitlines()]
