"""`narthex diff`: differences between two bundles, or between two modes for the same objects."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from narthex.cli.inputs import has_source, inputs_of, options_of_all_nodes, source_options
from narthex.cli.options import output_option
from narthex.cli.output import AnswersByStatus, print_document
from narthex.proxy.backends import BACKENDS
from narthex.proxy.plan.show import visible
from narthex.trace.follow.views import LinkAddress, NodeView
from narthex.trace.node.view import view_of_bundle, view_of_files
from narthex.trace.program.bundle import BundleError, read_bundle
from narthex.trace.reports.difference import ViewComparison, ViewDifference, diff_document, differences, rules_in_text


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
@output_option
def command(before: str, after: str, as_text: bool, output: str, **given: Any) -> None:
    """Show how two bundles differ.

    It compares the outcome of packets at each frontend with exact shares, then routes, policy rules, links, addresses and settings.
    Rules with different texts and the same meaning are equal. With --manifests or --kubeconfig, A and B may be modes: the rules that the
    same objects become on --node.

    Exit status, as for diff: 0 without differences, 1 with differences, 2 if it can't be decided.

    \b
        narthex diff yesterday.tgz today.tgz
        narthex diff iptables nftables --manifests DIR --node worker-a
    """
    try:
        (one, first), (other, second) = (_side(word, given) for word in (before, after))
    except BundleError as error:
        raise click.ClickException(str(error)) from error
    found = differences(one, other)
    if as_text:
        more = tuple(rules_in_text(first, second))
        found = msgspec.structs.replace(found, found=(*found.found, *more))
    print_document(diff_document(found), output, lambda: _text(found))
    sys.exit(found.status)


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
        raise click.UsageError(f"{word!r} is not a bundle; with --manifests or --kubeconfig it may be a mode: {modes}")
    bundle = read_bundle(path)
    return view_of_bundle(bundle.parts, bundle.table, str(path)), bundle.parts


def _text(found: ViewComparison) -> str:
    lines: list[str] = []
    for each in found.found:
        lines.append(f"{each.part}: {each.what}")
        lines += _sides(each)
    lines += [f"cannot tell: {text}" for text in found.unknown]
    return "".join(f"{visible(line)}\n" for line in lines)


def _sides(each: ViewDifference) -> list[str]:
    before = [f"  - {line}" for line in (each.before or "(not there)").splitlines()]
    return before + [f"  + {line}" for line in (each.after or "(not there)").splitlines()]
