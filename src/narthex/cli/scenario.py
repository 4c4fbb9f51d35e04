"""`narthex scenario`: packet-flow scenarios against the plan, the rules, and the kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import msgspec

from narthex.cli.options import output_option
from narthex.testing.findings import WitnessFinding, print_said
from narthex.testing.runner import WITNESSES, ScenarioCounts, ScenarioRequest, clean_up_on_signals, hear_all, modes_of
from narthex.testing.scenario import KNOWN_MODES, Scenario, ScenarioError, find, load


@click.group()
def command() -> None:
    """Check packet-flow scenarios against plan, rules, and kernel."""


def _known_modes(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    from narthex.proxy.backends import BACKENDS

    for value in values:
        if value not in KNOWN_MODES:
            raise click.BadParameter(f"{value!r} is not one of {', '.join(KNOWN_MODES)}", ctx, param)
        if value not in BACKENDS:
            raise click.BadParameter(f"mode {value} is not supported; use one of {', '.join(BACKENDS)}", ctx, param)
    return values


@command.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--mode", "modes", multiple=True, callback=_known_modes, help="Only this mode; repeatable.")
@click.option(
    "--against", multiple=True, type=click.Choice(WITNESSES), help="Only this witness; repeatable. Default: all."
)
@click.option("--skip-level", multiple=True, type=click.Choice(["quirk", "must"]), help="Skip scenarios of this level.")
@click.option(
    "-j", "--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Number of parallel scenarios."
)
@output_option
def run(
    files: tuple[Path, ...],
    modes: tuple[str, ...],
    against: tuple[str, ...],
    skip_level: tuple[str, ...],
    jobs: int,
    output: str,
) -> None:
    """Run scenario FILES (or all in a directory) and compare every flow with its expected outcome.

    The witness `plan` evaluates the plan, `rules` walks the rendered rules, and `kernel` sends real packets through network
    namespaces (as root). Exit status 0 only if at least one flow was checked and all checks passed.
    """
    request = ScenarioRequest(modes=modes, against=against or WITNESSES, skip_levels=frozenset(skip_level))
    if "kernel" in request.against:
        if os.geteuid() != 0:
            raise click.UsageError("the witness kernel requires root; without root use --against plan --against rules")
        clean_up_on_signals()
        request = msgspec.structs.replace(request, not_here=_not_here(modes))
    try:
        paths = find(list(files))
    except ScenarioError as error:
        raise click.UsageError(str(error)) from None
    counts = ScenarioCounts()
    for scenario, findings in hear_all(_loaded(paths, counts), request, jobs):
        _print_findings(scenario, findings, request, output)
        counts.add(findings)
        counts.scenarios += bool(findings)
    _print_summary(counts, output)
    sys.exit(0 if counts.all_hold else 1)


def _not_here(requested: tuple[str, ...]) -> frozenset[str]:
    """Return the modes that this machine does not support, and print them to stderr. Raises ClickException for a given one."""
    from narthex.proxy.backends import BACKENDS
    from narthex.proxy.program.dataplane import refusal

    reasons = {mode: why for mode in requested or BACKENDS if (why := refusal(mode))}
    if requested and reasons:
        raise click.ClickException(" ".join(reasons.values()))
    for mode, why in reasons.items():
        click.echo(f"skipping the kernel for mode {mode}: {why}", err=True)
    return frozenset(reasons)


def _loaded(paths: list[Path], counts: ScenarioCounts) -> list[Scenario]:
    """Load the scenarios. Invalid files are reported and counted."""
    scenarios = []
    for path in paths:
        try:
            scenario = load(path)
        except ScenarioError as error:
            counts.invalid += 1
            click.echo(f"error: {error}", err=True)
            continue
        for warning in scenario.warnings:
            click.echo(f"warning: {warning}", err=True)
        scenarios.append(scenario)
    return scenarios


def _print_findings(scenario: Scenario, findings: list[WitnessFinding], request: ScenarioRequest, output: str) -> None:
    """Print the findings of one scenario."""
    tally: dict[tuple[str, str], list[bool]] = {}
    for finding in findings:
        tally.setdefault((finding.mode, finding.against), []).append(finding.ok)
        if output == "json":
            click.echo(msgspec.json.encode(finding))
        elif not finding.ok:
            click.echo(f"FAIL {finding.scenario}, {finding.label} ({finding.mode}, {finding.against})")
            click.echo(f"     expected {print_said(finding.expect)}")
            click.echo(f"     got      {print_said(finding.got)}")
    if output == "text":
        for mode in modes_of(scenario, request):
            sums = [f"{w} {sum(oks)}/{len(oks)}" for (m, w), oks in tally.items() if m == mode]
            good = all(all(oks) for (m, _), oks in tally.items() if m == mode)
            if sums:
                click.echo(f"{'ok  ' if good else 'FAIL'} {scenario.name} ({mode}): {', '.join(sums)}")


def _print_summary(counts: ScenarioCounts, output: str) -> None:
    if output == "json":
        click.echo(msgspec.json.encode(counts))
        return
    if not counts.flows:
        click.echo("nothing was checked: no flow applies to a supported mode that was selected", err=True)
    invalid = f", {counts.invalid} invalid files" if counts.invalid else ""
    click.echo(f"{counts.scenarios} scenarios, {counts.flows} checks: {counts.ok} ok, {counts.failed} failed{invalid}")
