"""The checks of a release find what is missing. `make release-check` runs them on a built wheel."""

from email.message import Message

import pytest
from scripts.release_check import CheckFailure, check_changelog, check_fields, check_notes, check_urls


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
