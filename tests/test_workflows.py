"""Workflows of CI: what a release consists of, and that each `make` target exists."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def steps(name):
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def actions(name):
    return {step["uses"].partition("@")[0]: step.get("with", {}) for step in steps(name) if "uses" in step}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_targets_exist_and_rights_are_the_least(name):
    makefile = (ROOT / "Makefile").read_text()
    targets = [
        target
        for step in steps(name)
        for found in re.findall(r"make ([\w -]+)", step.get("run", ""))
        for target in found.split()
    ]
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


def test_a_release_is_signed_and_says_what_it_is_made_of():
    used = actions("release")
    assert used["actions/attest-build-provenance"] == {"subject-path": "dist*/*"}
    assert used["actions/attest-sbom"]["sbom-path"] == "build/narthex.cdx.json"
    image = used["docker/build-push-action"]
    assert image["platforms"] == "linux/amd64,linux/arm64"
    assert (image["provenance"], image["sbom"]) == ("mode=max", True)
    assert (ROOT / image["file"]).exists()
    assert any("cosign sign" in step.get("run", "") for step in steps("release"))
    assert {"pypa/gh-action-pypi-publish", "actions/deploy-pages"} <= set(used)


def test_all_supported_versions_of_python_are_tested():
    listed = WORKFLOWS["tests"]["jobs"]["unit"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: 3."
    assert listed == [each.rpartition(" ")[2] for each in project["classifiers"] if each.startswith(prefix)]
