"""Objects and rules of different moments: `check` reports what differs twice, and `bundle` reads both together."""

from pathlib import Path
from typing import Any

import pytest

from narthex.cli import check as command
from narthex.kube import snapshot
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program import bundle, travel
from narthex.trace.reports.check import CheckReport, Discrepancy, DiscrepancyKind

LIVE: dict[str, Any] = {"bundles": (), "dumps": (), "kubeconfig": "k", "master": ""}


def report(*services: str) -> CheckReport:
    found = (
        Discrepancy(kind=DiscrepancyKind.EXTRA, service=one, frontend=one, said=f"{one}, {number}")
        for number, one in enumerate(services)
    )
    return CheckReport(node="n", family="IPv4", frontends=1, endpoints=1, findings=tuple(found))


def settled(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], *readings: CheckReport) -> CheckReport:
    steps = iter(readings)
    monkeypatch.setattr(command, "_compared", lambda _: ((next(steps),), ()))
    monkeypatch.setattr(command, "_SETTLE_SECONDS", 0.0)
    ((found,), _) = command._settled(given)
    assert next(steps, None) is None
    return found


def test_a_difference_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settled(monkeypatch, LIVE, report("a", "b"), report("c", "b"))
    assert [one.service for one in found.findings] == ["b"]
    assert settled(monkeypatch, LIVE, report("a"), report()).status == 0
    assert settled(monkeypatch, LIVE, report()).status == 0


def test_a_bundle_is_older_than_the_objects_of_an_api(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**LIVE, "bundles": (Path("b.tgz"),)}
    (unknown,) = settled(monkeypatch, given, report("a")).unknown
    assert unknown.startswith("the rules were read before the objects")
    assert settled(monkeypatch, given, report()).unknown == ()
    assert settled(monkeypatch, {**given, "kubeconfig": None}, report("a")).unknown == ()


@pytest.mark.parametrize(("changes", "reads", "late"), [(0, 1, False), (1, 2, False), (9, 2, True)])
def test_a_bundle_has_rules_and_objects_of_one_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: int, reads: int, late: bool
) -> None:
    listed, gathered = [], []

    def lists(_: object) -> dict[str, Any]:
        version = str(min(len(listed), changes))
        listed.append(version)
        slices = {"kind": "EndpointSliceList", "items": [{"metadata": {"uid": "u", "resourceVersion": version}}]}
        return {**dict.fromkeys(snapshot._RAW_PATHS, snapshot.UNKNOWN_KIND), "endpointslices": slices}

    def gather(*_: object) -> bundle.GatheredParts:
        gathered.append(1)
        return bundle.GatheredParts(table=BundleManifest(node="n", writer="w", parts=()), parts={})

    monkeypatch.setattr(snapshot, "read_lists", lists)
    monkeypatch.setattr(bundle, "gather", gather)
    taken = bundle.take(master="http://127.0.0.1:1")
    assert len(gathered) == reads
    bundle.write_file(tmp_path / "b.tgz", taken.table, taken.parts)
    ((view,), _) = travel.from_bundles([tmp_path / "b.tgz"])
    changed = f"objects/endpointslices.json: {bundle.CHANGED}"
    assert (changed in view.partial) is late
