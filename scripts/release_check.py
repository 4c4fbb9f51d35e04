"""Check a release without a network beyond the package index: `make release-check`.

Builds the wheel and the sdist, checks their metadata, installs each into an empty environment of each supported Python that this machine
has, and explains a bug report there. Builds the archives of `kubectl narthex` and Krew's manifest, and runs the plugin from its archive;
RELEASE_URL is the folder on the web that the manifest names. Writes a bill of materials (CycloneDX) of the wheel and all packages that it
needs. Prints a line for each check; the exit status is 1 if one fails.
"""

from __future__ import annotations

import contextlib
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

from scripts import krew

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PLUGIN = ROOT / "dist-kubectl"
RELEASE_URL = "https://narthex.dev/releases/v{version}"
BUILD = ROOT / "build"
EXAMPLE = ROOT / "examples" / "bug-report"
TRACE = [
    "trace", "outside", "10.0.0.5:30001", "--rules", str(EXAMPLE / "iptables-save.txt"), "--rules",
    str(EXAMPLE / "ip-route.txt"), "--node-ip", "10.0.0.5",
]  # fmt: skip
NEEDED_FIELDS = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Project-URL", "Classifier")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


class CheckFailure(Exception):
    """A check that failed, with what to do."""


def main() -> int:
    """Run all checks."""
    for old in DIST.glob("*"):
        old.unlink()
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    metadata = read_metadata(wheel)
    failed = 0
    for title, check in _checks(wheel, sdist, metadata):
        try:
            found = check()
        except CheckFailure as failure:
            failed += 1
            print(f"FAILED  {title}: {failure}", flush=True)
        else:
            print(f"ok      {title}{f': {found}' if found else ''}", flush=True)
    return int(failed > 0)


def _checks(wheel: Path, sdist: Path, metadata: Message) -> Iterator[tuple[str, Callable[[], str]]]:
    version = metadata["Version"]
    yield "metadata (twine check)", lambda: _twine([wheel, sdist])
    yield "metadata has all fields", lambda: check_fields(metadata)
    yield "classifiers", lambda: check_classifiers(metadata)
    yield "URLs", lambda: check_urls(metadata)
    yield "changelog", lambda: check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    yield "release notes", lambda: check_notes(version)
    yield "wheel contains LICENSE and py.typed", lambda: check_content(wheel)
    yield "Helm chart", lambda: check_chart((ROOT / "deploy" / "helm" / "narthex" / "Chart.yaml").read_text(), version)
    pythons = available_pythons()
    for python, package in ((python, package) for python in pythons for package in (wheel, sdist)):
        title = f"{package.name} in an empty environment of Python {python}"
        yield title, lambda python=python, package=package: _install(package, version, pythons[python])
    yield "kubectl plugin from its archive", lambda: _plugin(wheel, version)
    missing = [each for each in PYTHONS if each not in pythons]
    yield "supported versions of Python", lambda: f"not on this machine: {', '.join(missing)}" if missing else "all"
    yield "bill of materials", lambda: _bill_of_materials(wheel)


def run(argv: list[str]) -> str:
    """Run a program and return its output. Raises CheckFailure with its output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir())
    if done.returncode:
        raise CheckFailure(f"`{' '.join(argv)}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def read_metadata(wheel: Path) -> Message:
    """Return the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as content:
        name = next(each for each in content.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(content.read(name))


def _twine(packages: list[Path]) -> str:
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, packages)])
    return ""


def check_fields(metadata: Message) -> str:
    """Check that no field is missing."""
    missing = [field for field in NEEDED_FIELDS if not metadata.get(field)]
    if missing:
        raise CheckFailure(f"pyproject.toml sets no {', '.join(missing)}")
    return ""


def check_classifiers(metadata: Message) -> str:
    """Check that all classifiers exist, and that each supported Python has one."""
    from trove_classifiers import classifiers

    found = metadata.get_all("Classifier", [])
    unknown = [each for each in found if each not in classifiers]
    lacking = [each for each in PYTHONS if f"Programming Language :: Python :: {each}" not in found]
    if unknown or lacking:
        raise CheckFailure(f"unknown: {unknown or 'none'}; Python versions without a classifier: {lacking or 'none'}")
    return f"{len(found)} classifiers"


def check_urls(metadata: Message) -> str:
    """Check that each URL has a label and uses https."""
    urls = metadata.get_all("Project-URL", [])
    bad = [each for each in urls if not re.fullmatch(r"[A-Z][A-Za-z ]+, https://[^\s]+", each)]
    if bad:
        raise CheckFailure(f"not of the form `Label, https://...`: {bad}")
    return f"{len(urls)} URLs"


def check_changelog(text: str, version: str) -> str:
    """Check that the first section of the changelog is that of the version."""
    first = re.search(r"(?m)^## (.*)$", text)
    if first is None or first[1].split()[0] != version:
        raise CheckFailure(f"CHANGELOG.md begins with {first[1] if first else 'no section'!r} instead of {version}")
    return ""


def check_notes(version: str) -> str:
    """Check that the release has notes."""
    if not (ROOT / "docs" / "releases" / f"{version}.md").is_file():
        raise CheckFailure(f"docs/releases/{version}.md is missing; the release workflow publishes it")
    return ""


def check_content(wheel: Path) -> str:
    """Check files that users of the wheel need."""
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    for suffix in ("/LICENSE", "narthex/py.typed", "narthex/lab/ui/static/index.html"):
        if not any(name.endswith(suffix) for name in names):
            raise CheckFailure(f"the wheel has no {suffix}")
    return f"{len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB"


def check_chart(text: str, version: str) -> str:
    """Check that the Helm chart has the version of the program."""
    found = dict(re.findall(r"(?m)^(version|appVersion): (\S+)$", text))
    if found != {"version": version, "appVersion": version}:
        raise CheckFailure(f"deploy/helm/narthex/Chart.yaml has {found}, not {version} twice")
    return ""


def available_pythons() -> dict[str, str]:
    """Return the interpreters of this machine that can make environments, by supported version."""
    found = {}
    for version in PYTHONS:
        for name in (f"python{version}", sys.executable):
            program = shutil.which(name)
            code = "import sys, ensurepip, venv; print('{}.{}'.format(*sys.version_info))"
            done = program and subprocess.run([program, "-c", code], capture_output=True, text=True, check=False)
            if done and done.stdout.strip() == version:
                found[version] = str(program)
                break
    return found


def _install(package: Path, version: str, python: str) -> str:
    with _environment(python, str(package)) as programs:
        shown = run([str(programs / "narthex"), "--version"])
        if version not in shown:
            raise CheckFailure(f"`narthex --version` prints {shown!r}")
        done = subprocess.run([programs / "narthex", *TRACE], capture_output=True, text=True, check=False)
        if "10.0.0.5:30001" not in done.stdout or done.returncode not in (0, 1):
            raise CheckFailure(f"`narthex trace` ended with status {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.splitlines()[0].strip()


def _plugin(wheel: Path, version: str) -> str:
    """Build the archives and the manifest of the plugin, and run it from the archive of this platform."""
    url = os.environ.get("RELEASE_URL", RELEASE_URL.format(version=version))
    try:
        krew.build(wheel, url, PLUGIN, tuple(krew.PLATFORMS), krew.PYTHONS)
    except subprocess.CalledProcessError as error:
        raise CheckFailure(str(error)) from error
    own = PLUGIN / krew.archive_name(krew.own_platform())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(own) as tar:
            tar.extractall(folder, filter="data")
        shown = run([str(Path(folder) / krew.NAME), "--version"])
    if version not in shown:
        raise CheckFailure(f"`kubectl narthex --version` prints {shown!r}")
    return f"{own.name}, {own.stat().st_size / 1e6:.1f} MB"


@contextlib.contextmanager
def _environment(python: str, *packages: str) -> Iterator[Path]:
    """Yield the folder of programs of a new environment with packages."""
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        programs = Path(folder) / "bin"
        run([str(programs / "pip"), "install", "--quiet", "--disable-pip-version-check", *packages])
        yield programs


def _bill_of_materials(wheel: Path) -> str:
    file = BUILD / "narthex.cdx.json"
    file.parent.mkdir(exist_ok=True)
    with _environment(sys.executable, f"{wheel}[all]") as programs:
        run([str(programs / "pip"), "uninstall", "--quiet", "--yes", "pip", "setuptools"])
        make = [sys.executable, "-m", "cyclonedx_py", "environment", str(programs / "python")]
        run([*make, "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--output-file", str(file)])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = declared["optional-dependencies"]
    names = [*declared["dependencies"], *extras["dns"], *extras["lab"], *extras["ui"]]
    return check_bill(json.loads(file.read_text()), names)


def check_bill(bill: dict[str, Any], requirements: Iterable[str]) -> str:
    """Check that a bill of materials in CycloneDX names each required package with its version."""
    if bill.get("bomFormat") != "CycloneDX" or bill["metadata"]["component"]["name"] != "narthex":
        raise CheckFailure("it is not a CycloneDX bill of narthex")
    have = {_plain_name(each["name"]): each.get("version") for each in bill["components"]}
    missing = [name for each in requirements if not have.get(name := _plain_name(re.split(r"[^\w.-]", each)[0]))]
    if missing:
        raise CheckFailure(f"it lacks {', '.join(missing)}")
    without = [each["name"] for each in bill["components"] if not each.get("purl")]
    if without:
        raise CheckFailure(f"no package URL: {', '.join(without)}")
    return f"{len(have)} packages"


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
