"""The checks of a release find what is missing. `make release-check` runs them on a built wheel."""

import sys
from email.message import Message

import pytest
from scripts.release_check import (
    CheckFailure,
    available_pythons,
    check_bill,
    check_changelog,
    check_chart,
    check_fields,
    check_notes,
    check_urls,
)


def metadata(**fields):
    made = Message()
    for name, values in fields.items():
        for value in values:
            made[name.replace("_", "-")] = value
    return made


def test_the_changelog_begins_with_the_version():
    assert check_changelog("# Changelog\n\n## 1.2.0 (2027-01-31)\n\n## 1.1.0\n", "1.2.0") == ""
    for text in ("# Changelog\n\n## Unreleased\n\n## 1.2.0\n", "# Changelog\n"):
        with pytest.raises(CheckFailure, match=r"instead of 1\.2\.0"):
            check_changelog(text, "1.2.0")


def test_urls_have_a_label_and_https():
    assert check_urls(metadata(Project_URL=["Homepage, https://example.org"])) == "1 URLs"
    for bad in ("https://example.org", "Homepage, http://example.org"):
        with pytest.raises(CheckFailure, match="not of the form"):
            check_urls(metadata(Project_URL=[bad]))


def test_missing_fields_and_notes_are_named():
    with pytest.raises(CheckFailure, match="Summary, License-Expression"):
        check_fields(
            metadata(
                Name=["narthex"],
                Version=["1"],
                Requires_Python=[">=3.11"],
                Project_URL=["A, https://x"],
                Classifier=["T"],
            )
        )
    with pytest.raises(CheckFailure, match=r"0\.0\.0\.md is missing"):
        check_notes("0.0.0")


def test_the_chart_has_the_version():
    assert check_chart("name: narthex\nversion: 1.2.0\nappVersion: 1.2.0\n", "1.2.0") == ""
    for text in ("version: 1.1.0\nappVersion: 1.2.0\n", "version: 1.2.0\n"):
        with pytest.raises(CheckFailure, match=r"not 1\.2\.0 twice"):
            check_chart(text, "1.2.0")


def bill(*components, name="narthex"):
    made = [{"name": each, "version": "1", "purl": f"pkg:pypi/{each}@1"} for each in components]
    return {"bomFormat": "CycloneDX", "metadata": {"component": {"name": name}}, "components": made}


def test_the_bill_of_materials_names_all_requirements():
    assert check_bill(bill("msgspec", "PyYAML"), ["msgspec>=0.18", "pyyaml>=6"]) == "2 packages"
    with pytest.raises(CheckFailure, match="it lacks google-re2"):
        check_bill(bill("msgspec"), ["msgspec>=0.18", "google_re2>=1.1"])
    with pytest.raises(CheckFailure, match="no package URL: msgspec"):
        check_bill({**bill("msgspec"), "components": [{"name": "msgspec", "version": "1"}]}, ["msgspec"])
    with pytest.raises(CheckFailure, match="not a CycloneDX bill of narthex"):
        check_bill(bill(name="other"), [])


def test_this_python_is_available():
    assert "{}.{}".format(*sys.version_info) in available_pythons()
