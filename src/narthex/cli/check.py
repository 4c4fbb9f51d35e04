"""`narthex check`: a cluster's objects against what a node's kernel does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from msgspec.structs import replace

from narthex.cli.inputs import node_options, node_options_of, options, source_options, views_of
from narthex.cli.options import lab_option, output_option
from narthex.cli.output import CANNOT_TELL, AnswersByStatus, json_text, working
from narthex.cli.terminal import color_option, print_labelled
from narthex.model import InputError, NamespacedName, visible
from narthex.trace.follow.views import NodeView
from narthex.trace.program.inputs import ClusterObjects, NodeOptions
from narthex.trace.program.reports import check_reports, proof_reports, status
from narthex.trace.proof.prove import ProofDocument, ProofReport
from narthex.trace.proof.text import proof_lines
from narthex.trace.render.styled import Style
from narthex.trace.reports.check import CheckDocument, CheckReport, Discrepancy


@click.command(cls=AnswersByStatus)
@source_options
@lab_option
@node_options
@options
@click.option("--watch", is_flag=True, help="Repeat until stopped, and print differences that come and go.")
@click.option(
    "--interval", type=click.FloatRange(0.1), default=5.0, show_default=True, metavar="SECONDS", help="For --watch."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.0),
    metavar="SECONDS",
    help="For --watch: end as soon as nothing differs, and after this time at the latest.",
)
@click.option(
    "--prove", "proving", is_flag=True, help="Prove that the rules do what the objects mean, for all packets."
)
@click.option("--service", metavar="NAMESPACE/NAME", help="For --prove: only packets to this Service.")
@output_option
@color_option
def command(
    watch: bool,
    interval: float,
    timeout: float | None,
    proving: bool,
    service: str | None,
    output: str,
    color: str,
    **given: Any,
) -> None:
    """Compare a cluster's objects with what a node's kernel does, for each frontend of each Service.

    Reports frontends and endpoints that are missing, stale, extra, or duplicated, wrong shares of traffic, rules of other programs that
    take the packets first, what keeps packets from their endpoints (policies, rules, routes, links), and tracked connections to endpoints
    that are gone.

    It walks the node's rules, so that it works for every proxy and mode. Objects are those of --manifests, --kubeconfig or the bundle.

    With rules of this node or of a lab, a difference is reported if it is there twice, 1.5 s apart: objects may change meanwhile.

    With --prove, it compares what rules and objects do with all packets that open connections, not with one packet for each frontend, and
    compares masquerading, too. The answer is a proof, the smallest class of packets that differs with a packet of it, or the rules that
    could not be interpreted.

    Exit status: 0 without differences, 1 with differences, 2 if it can't be decided.

    \b
        narthex check --kubeconfig ~/.kube/config
        narthex check --bundle node-1.tgz -o json
        narthex check --kubeconfig ~/.kube/config --watch --timeout 300
        narthex check --bundle node-1.tgz --prove --service shop/web
    """
    if timeout is not None and not watch:
        raise click.UsageError("--timeout is for --watch")
    if service is not None and not proving:
        raise click.UsageError("--service is for --prove")
    if watch and proving:
        raise click.UsageError("--prove and --watch exclude each other")
    if proving:
        proofs, problems = _proved(given, service)
        for problem in problems:
            click.echo(visible(problem), err=True)
        click.echo(_shown_proofs(proofs, output), nl=False)
        sys.exit(status(proofs))
    reports, problems = _settled(given)
    for problem in problems:
        click.echo(visible(problem), err=True)
    _print(reports, output, color)
    if watch:
        _watch(lambda: _compared(given)[0], reports, output, interval, timeout)
    else:
        sys.exit(status(reports))


Reports = tuple[CheckReport, ...]
_SETTLE_SECONDS = 1.5
"""After this time, a proxy has applied a change: it collects changes for a second."""


def _settled(given: dict[str, Any]) -> tuple[Reports, tuple[str, ...]]:
    """Compare, and compare again if objects may have changed while they and the rules were read: what differs both times differs."""
    reports, problems = _compared(given)
    if not any(report.findings for report in reports):
        return reports, problems
    if given["bundles"] or given["dumps"]:
        if given["kubeconfig"] or given["master"]:
            note = "the rules were read before the objects: a change in between is a difference, too (`narthex bundle --kubeconfig` reads both)"
            reports = tuple(replace(one, unknown=(*one.unknown, note)) if one.findings else one for one in reports)
        return reports, problems
    time.sleep(_SETTLE_SECONDS)
    again, problems = _compared(given)
    before = {_key(report, finding) for report in reports for finding in report.findings}
    return tuple(
        replace(report, findings=tuple(one for one in report.findings if _key(report, one) in before))
        for report in again
    ), problems


def _key(report: CheckReport, finding: Discrepancy) -> tuple[object, ...]:
    return report.node, report.family, finding.kind, finding.service, finding.frontend, finding.endpoint


def _proved(given: dict[str, Any], service: str | None) -> tuple[tuple[ProofReport, ...], tuple[str, ...]]:
    desired = None
    if service is not None:
        namespace, slash, name = service.partition("/")
        if not (namespace and slash and name):
            raise click.UsageError(f"--service {service}: expected NAMESPACE/NAME")
        desired = NamespacedName(namespace, name)
    return _of_views(given, "proving", lambda cluster, view, chosen: proof_reports(cluster, view, chosen, desired))


def _compared(given: dict[str, Any]) -> tuple[Reports, tuple[str, ...]]:
    return _of_views(given, "comparing objects and rules", check_reports)


AnyReport = TypeVar("AnyReport", CheckReport, ProofReport)


def _of_views(
    given: dict[str, Any],
    doing: str,
    reports_of: Callable[[ClusterObjects, NodeView, NodeOptions], tuple[tuple[AnyReport, ...], tuple[str, ...]]],
) -> tuple[tuple[AnyReport, ...], tuple[str, ...]]:
    """Return the reports about the nodes that the options choose, and problems of the objects."""
    views, cluster = views_of(given)
    if cluster is None:
        raise click.UsageError(
            "no objects given: use --manifests, --kubeconfig, --master, --lab, or a bundle that contains them"
        )
    if not given["lab"] and len(views) != 1:
        raise click.UsageError("expected one node: give one bundle, or dumps of one node")
    chosen = node_options_of(given)
    found: list[AnyReport] = []
    problems: dict[str, None] = {}
    try:
        for view in views:
            if given["lab"]:
                chosen = _of_lab(given["lab"], view.name)
            with working(doing):
                reports, more = reports_of(cluster, view, chosen)
            found += reports
            problems |= dict.fromkeys(more)
    except InputError as error:
        raise click.ClickException(str(error)) from error
    return tuple(found), tuple(problems)


def _of_lab(name: str, node: str) -> NodeOptions:
    from narthex.lab.program.trace import node_options_of as options_of_node

    return options_of_node(name, node)


def _watch(
    compared: Callable[[], Reports], reports: Reports, output: str, interval: float, timeout: float | None
) -> None:
    """Repeat a comparison and print changes, until stopped or as `timeout` says; then end with the last status."""
    begin = time.monotonic()
    since = dict.fromkeys(_differences(reports), begin)
    shown = _document(reports)
    answer = status(reports)
    try:
        while timeout is None or (answer and time.monotonic() - begin < timeout):
            time.sleep(interval)
            try:
                reports = compared()
            except click.UsageError:
                raise
            except click.ClickException as error:
                # During a rollout, an API server or a tool may fail once.
                answer = CANNOT_TELL
                click.echo(visible(f"cannot tell: {error.format_message()}"), err=True)
                continue
            answer = status(reports)
            if output == "json":
                before, shown = shown, _document(reports)
                click.echo(shown if shown != before else "", nl=False)
            else:
                _show_changes(reports, since)
    except KeyboardInterrupt:
        pass
    sys.exit(answer)


def _show_changes(reports: Reports, since: dict[str, float]) -> None:
    """Print differences that came and went, and update the times since when there are differences."""
    now = time.monotonic()
    present = dict.fromkeys(_differences(reports), now)
    come = [line for line in present if line not in since]
    gone = [line for line in since if line not in present]
    clock = time.strftime("%H:%M:%S")
    for line in gone:
        click.echo(f"{clock} - {line} (after {now - since.pop(line):.0f} s)")
    for line in come:
        since[line] = now
        click.echo(f"{clock} + {line}")
    for line in _verdicts(reports) if come or gone else ():
        click.echo(f"{clock} {line}")


def _print(reports: Reports, output: str, color: str) -> None:
    if output == "json":
        click.echo(_document(reports), nl=False)
        return
    lines: list[tuple[str, Style]] = []
    for report in reports:
        lines += [(line, Style.DOUBT if line.startswith(_UNKNOWN) else Style.BAD) for line in _differences((report,))]
        lines += [(line, Style.STRONG if report.status else Style.GOOD) for line in _verdicts((report,))]
    print_labelled(lines, color)


def _document(reports: Reports) -> str:
    return json_text(CheckDocument(status=status(reports), reports=reports))


def _shown_proofs(reports: tuple[ProofReport, ...], output: str) -> str:
    if output == "json":
        return json_text(ProofDocument(status=status(reports), reports=reports))
    return "".join(f"{visible(line)}\n" for report in reports for line in proof_lines(report))


_UNKNOWN = "cannot tell: "


def _differences(reports: Reports) -> list[str]:
    lines: list[str] = []
    for report in reports:
        for finding in report.findings:
            place = f" [{finding.place}]" if finding.place else ""
            sender = f" (asked as {finding.sender})" if finding.sender else ""
            lines.append(f"{finding.kind.value}: {finding.said}{place}{sender}")
        lines += [f"{_UNKNOWN}{text}" for text in report.unknown]
    return [visible(line) for line in lines]


def _verdicts(reports: Reports) -> list[str]:
    lines: list[str] = []
    for report in reports:
        where = f"node {report.node}, {report.family}" if report.node else report.family
        verdict = ("the same", f"{len(report.findings)} differences", "cannot tell")[report.status]
        lines.append(f"{where}: {report.frontends} frontends, {report.endpoints} endpoints: {verdict}")
    return [visible(line) for line in lines]
