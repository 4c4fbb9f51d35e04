"""`narthex query`: questions about all packets of a node, in operators' terms."""

from __future__ import annotations

import sys
from typing import Any

import click

from narthex.cli.inputs import has_source, node_options, node_options_of, options, source_options, views_of
from narthex.cli.options import lab_option, output_option
from narthex.cli.output import AnswersByStatus, json_text, working
from narthex.cli.terminal import color_option, line_width, print_lines
from narthex.model import InputError, visible
from narthex.trace.program.inputs import NodeOptions
from narthex.trace.program.questions import query_reports
from narthex.trace.program.reports import status
from narthex.trace.proof.changes import MOST_LINES
from narthex.trace.query.answer import QueryDocument, QueryReport
from narthex.trace.query.question import FORMS, Question, forms_text, read_question
from narthex.trace.query.text import query_lines
from narthex.trace.render.styled import StyledLine


def _examples(_ctx: click.Context, _param: click.Parameter, begin: str) -> list[str]:
    """Return the examples of questions that a shell completes."""
    return [form.example for form in FORMS if form.example.startswith(begin)]


class _QueryCommand(AnswersByStatus):
    """A command whose help lists the forms of questions."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the forms."""
        formatter.write("\n" + forms_text() + "\n")


@click.command(cls=_QueryCommand)
@click.argument("asked", metavar="QUESTION", shell_complete=_examples)
@source_options
@lab_option
@node_options
@options
@click.option("--all", "every", is_flag=True, help="Do not shorten the answer.")
@color_option
@output_option
def command(asked: str, every: bool, color: str, output: str, **given: Any) -> None:
    """Answer a question about all packets that open connections through a node.

    The answer is the complete set of packets, as short descriptions, and as exact sets with -o json. It comes from the rules of the node, as
    `narthex check` reads them, and from objects (--manifests, --kubeconfig, or those of the bundle), or from one of them: with objects alone,
    the rules of this node are only read with --live. Rules and objects are compared if both are there. The rules that Narthex could not
    interpret are listed with the packets that they leave undecided.

    Exit status: 0 for a certain answer, 1 if rules and objects give different answers, 2 if a part is undecided or on errors.

    \b
        narthex query 'who reaches 10.244.2.7:8080?' --bundle node-1.tgz
        narthex query 'what can outside reach?' --manifests DIR --node node-1
        narthex query 'which Services can leave this node without masquerade?' --live --kubeconfig ~/.kube/config
    """
    try:
        question = read_question(asked)
        reports, problems = _answered(question, None if every else MOST_LINES, given)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    for problem in problems:
        click.echo(visible(problem), err=True)
    found = status(reports)
    if output == "json":
        click.echo(json_text(QueryDocument(status=found, question=question.text, reports=reports)), nl=False)
    else:
        _print(reports, color)
    sys.exit(found)


def _answered(
    question: Question, most: int | None, given: dict[str, Any]
) -> tuple[tuple[QueryReport, ...], tuple[str, ...]]:
    """Return the answers about the nodes that the options choose, and problems of the objects."""
    views, cluster = views_of(given, default_live=not has_source(given))
    if not given["lab"] and len(views) > 1:
        raise click.UsageError("expected one node: give one bundle, or dumps of one node")
    chosen = node_options_of(given)
    reports: list[QueryReport] = []
    problems: dict[str, None] = {}
    for view in views or (None,):
        if given["lab"] and view is not None:
            chosen = _of_lab(given["lab"], view.name)
        with working("asking rules and objects"):
            found, more = query_reports(question, view, cluster, chosen, most)
        reports += found
        problems |= dict.fromkeys(more)
    return tuple(reports), tuple(problems)


def _of_lab(name: str, node: str) -> NodeOptions:
    from narthex.lab.program.trace import node_options_of as options_of_node

    return options_of_node(name, node)


def _print(reports: tuple[QueryReport, ...], color: str) -> None:
    lines: list[StyledLine] = []
    for report in reports:
        lines += [(), *query_lines(report, line_width())] if lines else query_lines(report, line_width())
    print_lines(lines, color)
