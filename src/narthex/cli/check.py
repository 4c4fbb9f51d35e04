"""`narthex check`: a cluster's objects against what a node's kernel does."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from narthex.cli.inputs import node_options, node_options_of, options, source_options, views_of
from narthex.cli.options import output_option
from narthex.cli.output import AnswersByStatus, json_text
from narthex.proxy.plan.show import visible
from narthex.trace.program.inputs import InputError
from narthex.trace.program.reports import check_reports, status
from narthex.trace.reports.check import CheckDocument, CheckReport


@click.command(cls=AnswersByStatus)
@source_options
@node_options
@options
@click.option("--watch", is_flag=True, help="Repeat until stopped, and print the result when it changes.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="SECONDS", help="For --watch."
)
@output_option
def command(watch: bool, interval: float, output: str, **given: Any) -> None:
    """Compare a cluster's objects with what a node's kernel does, for each frontend of each Service.

    Reports frontends and endpoints that are missing, stale, extra, or duplicated, wrong shares of traffic, rules of other programs that
    take the packets first, and tracked connections to endpoints that are gone.

    It walks the node's rules, so that it works for every proxy and mode. Objects are those of --manifests, --kubeconfig or the bundle.

    Exit status: 0 without differences, 1 with differences, 2 if it can't be decided.

    \b
        narthex check --kubeconfig ~/.kube/config
        narthex check --bundle node-1.tgz -o json
    """
    before: str | None = None
    while True:
        reports, problems = _compared(given)
        shown = _shown(reports, output)
        if shown != before:
            for problem in problems if before is None else ():
                click.echo(visible(problem), err=True)
            click.echo(shown, nl=False)
        if not watch:
            sys.exit(status(reports))
        before = shown
        time.sleep(interval)


def _compared(given: dict[str, Any]) -> tuple[tuple[CheckReport, ...], tuple[str, ...]]:
    views, cluster = views_of(given)
    if cluster is None:
        raise click.UsageError(
            "no objects given: use --manifests, --kubeconfig, --master, or a bundle that contains them"
        )
    if len(views) != 1:
        raise click.UsageError("expected one node: give one bundle, or dumps of one node")
    try:
        return check_reports(cluster, views[0], node_options_of(given))
    except InputError as error:
        raise click.ClickException(str(error)) from error


def _shown(reports: tuple[CheckReport, ...], output: str) -> str:
    if output == "json":
        return json_text(CheckDocument(status=status(reports), reports=reports))
    lines: list[str] = []
    for report in reports:
        where = f"node {report.node}, {report.family}" if report.node else report.family
        for finding in report.findings:
            place = f" [{finding.place}]" if finding.place else ""
            sender = f" (asked as {finding.sender})" if finding.sender else ""
            lines.append(f"{finding.kind.value}: {finding.said}{place}{sender}")
        lines += [f"cannot tell: {text}" for text in report.unknown]
        verdict = ("the same", f"{len(report.findings)} differences", "cannot tell")[report.status]
        lines.append(f"{where}: {report.frontends} frontends, {report.endpoints} endpoints: {verdict}")
    return "".join(f"{visible(line)}\n" for line in lines)
