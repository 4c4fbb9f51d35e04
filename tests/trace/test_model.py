"""The journey's value and its JSON."""

import json
from fractions import Fraction
from pathlib import Path

from narthex.cli.output import json_text
from narthex.trace.causes.catalogue import FindingRecord
from narthex.trace.document import ProbeRecord, TraceDocument, trace_document
from narthex.trace.model import (
    Fate,
    Header,
    MissingPart,
    NameLookup,
    NearMiss,
    PacketPath,
    Party,
    PathBranch,
    PathEnd,
    PathStep,
    PlanReading,
    PlanStep,
    Stage,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "json.md"


def half(number: int, *ways: PathBranch) -> PathBranch:
    step = PathStep(stage=Stage.PREROUTING, what=f"rule {number}", probability=Fraction(1, 2))
    return PathBranch(steps=(step,), probability=Fraction(1, 2), branches=ways, end=None if ways else end(number))


def end(number: int) -> PathEnd:
    return PathEnd(fate=Fate.DELIVERED, address=f"10.0.0.{number}", port=80)


def journey() -> PacketPath:
    return PacketPath(
        packet=Header(source="10.0.0.9", destination="10.96.0.1", port=80, protocol="tcp"),
        source=Party(address="10.0.0.9"),
        destination=Party(address="10.96.0.1", name="Service shop/web"),
        tree=PathBranch(branches=(half(1), half(2, half(3), half(4)))),
    )


def test_leaves_carry_their_whole_way_and_their_exact_share() -> None:
    leaves = journey().leaves()
    assert [(leaf.probability, leaf.end.address) for leaf in leaves] == [
        (Fraction(1, 2), "10.0.0.1"),
        (Fraction(1, 4), "10.0.0.3"),
        (Fraction(1, 4), "10.0.0.4"),
    ]
    assert [step.what for step in leaves[2].steps] == ["rule 2", "rule 4"]
    assert sum(journey().ends().values()) == 1


def test_json_holds_fractions_as_text_and_the_ends_beside_the_tree() -> None:
    data = json.loads(json_text(trace_document(journey())))
    assert data["version"] == 1
    assert [(each["probability"], each["address"]) for each in data["ends"]][:2] == [
        ("1/2", "10.0.0.1"),
        ("1/4", "10.0.0.3"),
    ]
    assert data["way"]["ways"][1]["ways"][0]["steps"][0]["chance"] == "1/2"


def test_every_field_is_documented() -> None:
    page = PAGE.read_text()
    names = {
        name
        for kind in (
            *(Header, NearMiss, Party, PathStep, PathEnd, PathBranch, MissingPart),
            *(NameLookup, PlanStep, PlanReading, TraceDocument, FindingRecord, ProbeRecord),
        )
        for name in kind.__struct_encode_fields__
    }
    assert {name for name in names if f"`{name}`" not in page} == set()
    assert {word.value for word in (*Stage, *Fate) if f"`{word.value}`" not in page} == set()
