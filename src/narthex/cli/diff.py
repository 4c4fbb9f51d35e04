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
from narthex.model import InputError, visible
from narthex.proxy.backends import BACKENDS
from narthex.trace.follow.views import LinkAddress, NodeView
from narthex.trace.node.view import view_of_bundle, view_of_files
from narthex.trace.program.bundle import read_bundle
from narthex.trace.program.reports import prospect
from narthex.trace.program.travel import from_files, is_bundle, texts_of
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
@click.option("--all", "every", is_flag=True, help="Include differences that two nodes always have.")
@output_option
def command(before: str, after: str, as_text: bool, every: bool, output: str, **given: Any) -> None:
    """Show how two bundles differ, or two files with rules.

    A file may hold whatever `narthex trace --rules` reads: iptables-save, `iptables -S`, `nft list ruleset`, `ip route`.

    It compares what packets meet at each frontend, with exact shares and up to the endpoint or the next node, then routes, policy rules,
    links, addresses and settings. Rules with different texts and the same meaning are equal. Of two nodes, it only counts differences in
    their own addresses and pods. The last lines say what was not compared.

    With --manifests or --kubeconfig, A and B may be modes: what changes for packets, as `narthex migrate` shows it.

    Exit status, as for diff: 0 without differences, 1 with differences, 2 if it can't be decided.

    \b
        narthex diff yesterday.tgz today.tgz
        narthex diff iptables nftables --manifests DIR --node worker-a
    """
    try:
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
        inputs = inputs_of({**given, "mode": word})
        backend: Any = BACKENDS[word]
        texts = [
            (f"{word} {family.label}", backend.text(backend.render(inputs.plan(family)))) for family in inputs.families
        ]
        view = view_of_files(texts, inputs.config.node_name)
        view.origin = f"mode {word}"
        view.addresses = tuple(LinkAddress(ip, 128 if ":" in ip else 32, "eth0") for ip in inputs.host.addresses)
        return view, {f"rules/{name}": text for name, text in texts}
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
