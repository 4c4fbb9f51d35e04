"""A run of Kubernetes' end-to-end suite: which tests are chosen, what each reported, and the report as JUnit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal
from xml.etree import ElementTree as xml

import msgspec

DEFAULT_FOCUS = r"\[sig-network\].*\[Conformance\]"
_TEST = "It"
_SERIAL = "Serial"
_SKIPPED = ("skipped", "pending")
_LONG = re.compile(
    r"\[Slow\]|[Cc]onntrack|Granular Checks|HostPort|different protocols|session affinity|endpoints? from pods"
)
"""Names of tests that take longer than most: they begin first, so that none of them runs alone at the end."""
_MOST_OUTPUT = 64 * 1024
"""Characters of a failed test's output in the JUnit file, from its end: a test that polls for minutes writes megabytes."""
_NOT_XML = {code: None for code in range(32) if chr(code) not in "\t\n\r"}


class Failure(msgspec.Struct, frozen=True, rename="pascal"):
    """Why a test failed, as the suite reports it."""

    message: str = ""
    forwarded_panic: str = ""


class CaseReport(msgspec.Struct, frozen=True, rename="pascal"):
    """What the suite reports of one test, or of a step before and after all tests."""

    leaf_node_type: str
    state: str
    container_hierarchy_texts: Sequence[str] | None = None
    container_hierarchy_labels: Sequence[Sequence[str] | None] | None = None
    leaf_node_labels: Sequence[str] | None = None
    leaf_node_text: str = ""
    run_time: int = 0
    """Nanoseconds."""
    failure: Failure | None = None
    captured_ginkgo_writer_output: str = ""

    @property
    def name(self) -> str:
        """Full name of the test, to which --focus applies."""
        return " ".join([*(self.container_hierarchy_texts or ()), self.leaf_node_text])

    @property
    def is_test(self) -> bool:
        """False for a step before or after all tests."""
        return self.leaf_node_type == _TEST

    @property
    def is_skipped(self) -> bool:
        """True if it did not run."""
        return self.state in _SKIPPED

    @property
    def is_serial(self) -> bool:
        """True if it runs after all others, alone."""
        labels = [self.leaf_node_labels or (), *(each or () for each in self.container_hierarchy_labels or ())]
        return any(_SERIAL in each for each in labels)


class _SuiteReport(msgspec.Struct, rename="pascal"):
    spec_reports: list[CaseReport]


_REPORTS = msgspec.json.Decoder(list[_SuiteReport])


class ChosenCases(msgspec.Struct, frozen=True):
    """The tests that a run consists of."""

    names: frozenset[str]
    by_position: dict[int, str]
    """Names of those that may run at the same time as others, by their position in the suite's order; the longest come first."""
    positions: int
    """How many tests of the suite may run at the same time as others, chosen or not."""


def choose(report: bytes) -> ChosenCases:
    """Read the report of a dry run. Raises msgspec.DecodeError if it is none."""
    tests = [each for suite in _REPORTS.decode(report) for each in suite.spec_reports if each.is_test]
    parallel = [each for each in tests if not each.is_serial]
    chosen = [(position, each.name) for position, each in enumerate(parallel) if not each.is_skipped]
    chosen.sort(key=lambda each: _LONG.search(each[1]) is None)
    return ChosenCases(frozenset(each.name for each in tests if not each.is_skipped), dict(chosen), len(parallel))


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one test."""

    name: str
    state: Literal["passed", "failed", "skipped"]
    """Skipped: the test itself found that it does not apply to this cluster."""
    seconds: float
    reason: str = ""
    """The first line of why it failed or does not apply."""


class CaseOutput(msgspec.Struct, frozen=True):
    """A result with all that the test said."""

    result: CaseResult
    message: str = ""
    output: str = ""


def result_of(report: CaseReport) -> CaseOutput:
    """Return the result of a test that ran."""
    failure = report.failure or Failure()
    message = "\n".join(part for part in (failure.message, failure.forwarded_panic) if part)
    state: Literal["passed", "failed", "skipped"] = "failed"
    if report.is_skipped:
        state = "skipped"
    elif report.state == "passed":
        state = "passed"
    reason = "" if state == "passed" else first_line(message) or report.state
    result = CaseResult(name=report.name, state=state, seconds=round(report.run_time / 1e9, 3), reason=reason)
    return CaseOutput(result, message, report.captured_ginkgo_writer_output[-_MOST_OUTPUT:])


def lost(name: str, why: str) -> CaseOutput:
    """Return the result of a test of which the suite reported nothing."""
    return CaseOutput(CaseResult(name=name, state="failed", seconds=0.0, reason=why), why)


def first_line(message: str) -> str:
    """Return the first line of a message, with the next one if the first only introduces it: `Unexpected error:`."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def junit(results: Iterable[CaseOutput], suite: str, seconds: float) -> str:
    """Return results as a JUnit document."""
    root = xml.Element("testsuite", name=suite, time=f"{seconds:.3f}")
    counts = {"tests": 0, "failures": 0, "skipped": 0, "errors": 0}
    for each in results:
        result = each.result
        counts["tests"] += 1
        at = xml.SubElement(root, "testcase", name=_clean(result.name), classname=suite, time=f"{result.seconds:.3f}")
        if result.state == "failed":
            counts["failures"] += 1
            xml.SubElement(at, "failure", message=_clean(result.reason)).text = _clean(each.message)
            xml.SubElement(at, "system-out").text = _clean(each.output)
        elif result.state == "skipped":
            counts["skipped"] += 1
            xml.SubElement(at, "skipped", message=_clean(result.reason))
    root.attrib |= {name: str(count) for name, count in counts.items()}
    xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _clean(text: str) -> str:
    """Remove the characters that XML does not allow."""
    return text.translate(_NOT_XML)
