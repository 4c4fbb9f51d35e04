"""`narthex lab conformance`: Kubernetes' own verdict on the network."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from narthex.cli.lab import external_options, report_lab_errors
from narthex.cli.options import output_option
from narthex.cli.output import AnswersByStatus, print_document, working
from narthex.lab.conformance import DEFAULT_FOCUS, CaseResult, junit
from narthex.lab.program.options import LabOptions
from narthex.lab.program.state import LabError
from narthex.runtime.logs import printable

if TYPE_CHECKING:
    from narthex.lab.program.conformance.run import ConformanceOptions, ConformanceProgress, ConformanceRun

_NAME = "conformance"
_MODES = ("nftables", "iptables", "ipvs", "userspace")
_WIDTH = 80
_INDENT = 17
_program = click.Path(path_type=Path, exists=True, dir_okay=False, resolve_path=True)


class LabConformanceDocument(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="lab-conformance"):
    """What `narthex lab conformance -o json` prints."""

    version: Literal[1] = 1
    suite: str
    """Version of e2e.test."""
    mode: str
    """Proxy mode of the lab's nodes."""
    nodes: int
    processes: int
    """Processes of the suite that ran at the same time."""
    seconds: float
    """Duration of the suite, without the lab's start."""
    passed: int
    failed: int
    skipped: int
    tests: tuple[CaseResult, ...]
    """In the order in which they ended."""


def _regex(_ctx: click.Context, _param: click.Parameter, value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"{value!r} is not a regular expression: {error}") from None
    return value


@click.command(cls=AnswersByStatus)
@click.option("--e2e", required=True, type=_program, help="Kubernetes' e2e.test: the program of an official release.")
@click.option("--agnhost", required=True, type=_program, help="The program agnhost, which the tests' pods run.")
@click.option("--mode", default="nftables", show_default=True, type=click.Choice(_MODES), help="Proxy mode.")
@click.option("--focus", default=DEFAULT_FOCUS, callback=_regex, metavar="REGEX", help="Tests to run, by their names; "
              f"default: {DEFAULT_FOCUS}")  # fmt: skip
@click.option("--skip", default="", callback=_regex, metavar="REGEX", help="Tests not to run.")
@click.option("--procs", default=6, show_default=True, type=click.IntRange(1, 32), help="Tests that run at a time.")
@click.option("--nodes", default=3, show_default=True, type=click.IntRange(2, 20), help="Number of the lab's nodes.")
@click.option("--pool", "pools", multiple=True, metavar="CIDR", help="Addresses for load balancers; repeatable.")
@click.option("--junit", "junit_file", type=click.Path(path_type=Path, dir_okay=False, writable=True), metavar="FILE",
              help="Write the results as JUnit, with the output of tests that failed.")  # fmt: skip
@external_options
@click.option("--name", default=_NAME, show_default=True, help="Name of the lab.")
@output_option
@report_lab_errors
def conformance(
    e2e: Path,
    agnhost: Path,
    mode: str,
    focus: str,
    skip: str,
    procs: int,
    nodes: int,
    pools: tuple[str, ...],
    junit_file: Path | None,
    name: str,
    output: str,
    **external: Any,
) -> None:
    """Run Kubernetes' end-to-end tests against a lab, and show which fail and why.

    Starts a lab of its own, runs the tests, and removes it, also after Ctrl-C. Exit status: 0 all passed, 1 some failed, 2 the tests
    could not run.
    """
    from narthex.lab.program.conformance.image import missing_programs
    from narthex.lab.program.conformance.run import ConformanceOptions, run_suite

    for program in (e2e, agnhost):
        if not os.access(program, os.X_OK):
            raise LabError(f"{program} is not a program: it is not executable")
    for package in missing_programs():
        click.echo(f"Some tests fail on this machine until the package {package} is installed.", err=True)
    lab = LabOptions(nodes=nodes, mode=mode, pools=pools, **external)
    options = ConformanceOptions(e2e=e2e, agnhost=agnhost, name=name, lab=lab, processes=procs, focus=focus, skip=skip)
    progress = _Progress()
    with working(progress.text):
        run = run_suite(options, progress.note)
    if junit_file is not None:
        junit_file.write_text(junit(run.results, f"Kubernetes {run.version} on narthex, {mode} mode", run.seconds))
    document = _document(options, run)
    print_document(document, output, lambda: "".join(f"{line}\n" for line in _text(document)))
    if document.failed:
        raise SystemExit(1)


def _document(options: ConformanceOptions, run: ConformanceRun) -> LabConformanceDocument:
    results = tuple(each.result for each in run.results)
    states = Counter(each.state for each in results)
    return LabConformanceDocument(
        suite=run.version,
        mode=options.lab.mode,
        nodes=options.lab.nodes,
        processes=options.processes,
        seconds=run.seconds,
        passed=states["passed"],
        failed=states["failed"],
        skipped=states["skipped"],
        tests=results,
    )


class _Progress:
    """What is shown while tests run: a line on a terminal, otherwise a line for each test."""

    def __init__(self) -> None:
        self._now: ConformanceProgress | None = None

    def note(self, now: ConformanceProgress) -> None:
        """Remember the progress; without a terminal, also print one line for each finished test."""
        self._now = now
        if now.last is not None and not sys.stderr.isatty():
            result = now.last.result
            line = f"{now.done}/{now.total}  {result.state:<7} {result.seconds:6.1f} s  {result.name}"
            click.echo(printable(line), err=True)

    def text(self) -> str:
        """Return the line that the terminal shows while the tests run."""
        now = self._now
        if now is None:
            return "starting the lab"
        last = f"; last: {printable(now.last.result.name)}" if now.last else ""
        return f"{now.done} of {now.total} tests done, {now.failed} failed{last}"


def _text(found: LabConformanceDocument) -> Iterator[str]:
    """Yield the lines of the report, 80 columns wide."""
    ran = f"Kubernetes {found.suite}, {found.mode} mode, {found.nodes} nodes, {found.processes} at a time"
    if found.failed:
        yield "FAILED  SECONDS  TEST, AND WHY IT FAILED"
        for each in (each for each in found.tests if each.state == "failed"):
            name = textwrap.wrap(printable(each.name), _WIDTH - _INDENT)
            yield f"        {each.seconds:7.1f}  {name[0]}"
            yield from (f"{'':{_INDENT}}{line}" for line in name[1:])
            yield f"{'':{_INDENT}}  {printable(each.reason)}"[:_WIDTH]
        yield ""
    skipped = f", {found.skipped} skipped themselves" if found.skipped else ""
    total = found.passed + found.failed
    yield f"{found.passed} of {total} tests passed{skipped}, in {found.seconds:.0f} s ({ran})."
