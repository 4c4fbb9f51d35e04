"""Evidence by reference is bounded, and large parts are read piece by piece."""

import json

import pytest

from narthex.trace.agents.evidence import LONGEST_PART, MOST_BYTES, MOST_DOCUMENTS, EvidenceStore
from narthex.trace.agents.requests import RequestError


def test_the_oldest_documents_make_room():
    store = EvidenceStore()
    first, *others = [store.add({"kind": "plan", "number": number}, 10) for number in range(MOST_DOCUMENTS + 1)]
    assert [store.read(each + "/number") for each in others] == list(range(1, MOST_DOCUMENTS + 1))
    with pytest.raises(RequestError, match="repeat the request"):
        store.read(first)
    last = store.add({"kind": "trace"}, MOST_BYTES + 1)
    assert store.references() == [(last, "trace")]


def test_a_large_part_is_an_outline_of_references():
    store = EvidenceStore()
    reference = store.add({"rules": ["x" * 500] * 1000, "kind": "check"}, 600_000)
    outline = store.read(reference)
    assert [line["reference"] for line in outline["outline"]] == [f"{reference}/rules", f"{reference}/kind"]
    inner = store.read(outline["outline"][0]["reference"])
    assert len(json.dumps(inner)) < LONGEST_PART and inner["left_out"] == 800
    assert store.read(inner["outline"][7]["reference"]) == "x" * 500


@pytest.mark.parametrize("path", ["/none", "/rules/1", "/rules/-1", "/rules/0/0", "/kind/0", "/"])
def test_a_path_that_leads_nowhere_says_what_there_is(path):
    store = EvidenceStore()
    reference = store.add({"rules": ["x"], "kind": "check"}, 10)
    with pytest.raises(RequestError, match=r"there is no|no reference"):
        store.read(reference + path)
