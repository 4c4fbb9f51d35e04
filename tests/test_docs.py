"""Every command that the documents show is run, and prints what they say.

In a block of kind `console`, `$` begins a command for anyone and `#` one for root; what follows is its output, where
`...` stands for anything. Spaces at line ends do not count. `export NAME=VALUE` holds for what follows on the page. A last
line `[exit status N]` says how the command ends when that is part of its answer.

Commands in blocks of kind `sh` need a cluster: `tests/howtos.py` runs those of the how-tos.
"""

import doctest
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests import howtos
from tests.howtos import shell_lines
from tests.lab.kernel.lab_cluster import CONTROL_PLANES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
STATUS = re.compile(r"\[exit status (\d+)\]")
NEEDS_ROOT = ("narthex lab ", "--lab ", "kubectl ")
EXPORT = re.compile(r"export (\w+)=(\S+)")


def commands(page):
    """(command, needs root, expected output) of a page, in order."""
    found = []
    for block in BLOCK.findall(page.read_text()):
        for line in block.splitlines():
            if line[:2] in ("$ ", "# "):
                found.append([line[2:], line[0] == "#" or any(word in line for word in NEEDS_ROOT), []])
            else:
                found[-1][2].append(line)
    return found


def run_page(page):
    try:
        run_commands(page)
    except BaseException:
        for command, _, _ in commands(page):
            if command.startswith("narthex lab down"):
                subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT / "src", capture_output=True)
        raise


def run_commands(page):
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT / "src")}
    for command, _, expected in commands(page):
        if set_there := EXPORT.fullmatch(command):
            environment[set_there[1]] = set_there[2]
            continue
        words = shlex.split(command)
        assert words[0] in ("narthex", "kubectl"), (
            f"{page}: {command}: only narthex's own commands and kubectl are run here"
        )
        own = [sys.executable, "-m"] if words[0] == "narthex" else []
        done = subprocess.run([*own, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        told = STATUS.fullmatch(expected[-1]) if expected else None
        expected = expected[:-1] if told else expected
        status = int(told[1]) if told else 0
        assert done.returncode == status, f"{page.name}: {command}\n{done.stdout}{done.stderr}"
        want = "".join(f"{line.rstrip()}\n" for line in expected)
        got = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
        fits = doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        assert fits or not (expected or told), f"{page.name}: {command}\nexpected:\n{want}\ngot:\n{got}"


def pages(root):
    chosen = [page for page in PAGES if commands(page) and any(needs for _, needs, _ in commands(page)) is root]
    return pytest.mark.parametrize("page", chosen, ids=lambda page: page.stem)


@pages(root=False)
def test_commands_for_anyone(page):
    run_page(page)


@pytest.mark.kernel
@pages(root=True)
def test_commands_for_root(page):
    run_page(page)


ALL_HOW_TOS = "NARTHEX_HOWTOS" in os.environ
HOW_TOS = sorted((ROOT / "docs" / "howto").glob("*.md"))


def test_each_how_to_with_commands_has_a_row_and_each_other_test_exists():
    assert [page.stem for page in HOW_TOS if shell_lines(page)] == sorted(howtos.PAGES)
    for settings in howtos.PAGES.values():
        assert [path for path in settings.elsewhere.values() if not (ROOT / path).exists()] == []


def run_how_tos(tmp_path, control_plane, *, installs, all_pages=True):
    chosen = [name for name, settings in howtos.PAGES.items() if settings.installs is installs]
    chosen = [name for name in chosen if all_pages or name in howtos.QUICK]
    # It ends with a node that is gone.
    chosen.sort(key=lambda name: name == "break-things")
    if control_plane:
        chosen = [name for name in chosen if name != "record-and-replay"]
    failed = []
    with howtos.cluster_for(installs=installs, control_plane=control_plane, directory=tmp_path) as cluster:
        for name in chosen:
            try:
                howtos.PageRun(cluster, name, tmp_path / name).run()
            except AssertionError as error:
                failed.append(str(error))
    assert failed == [], "\n\n".join(failed)


@pytest.mark.kernel
@pytest.mark.parametrize("control_plane", CONTROL_PLANES)
def test_how_tos_as_written(tmp_path, control_plane):
    run_how_tos(tmp_path, CONTROL_PLANES[control_plane], installs=False, all_pages=ALL_HOW_TOS)


if ALL_HOW_TOS:

    @pytest.mark.kernel
    @pytest.mark.parametrize("control_plane", CONTROL_PLANES)
    def test_how_tos_that_install_it_as_written(tmp_path, control_plane):
        """It takes minutes, so only `make howtos` has it."""
        run_how_tos(tmp_path, CONTROL_PLANES[control_plane], installs=True)


def test_links_lead_somewhere():
    for page in [*PAGES, *ROOT.glob("*.md"), ROOT / "tests" / "scenarios" / "README.md"]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target} is not there"


def test_the_page_of_commands_is_what_the_commands_say():
    argv = [sys.executable, str(ROOT / "scripts" / "commands_page.py"), "-"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=True)
    page = ROOT / "docs" / "reference" / "commands.md"
    assert page.read_text() == done.stdout, "run `python scripts/commands_page.py`"


def test_readme_shows_the_two_commands():
    text = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in text
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_picture_of_the_readme_is_what_the_command_draws():
    report = "examples/bug-report/docker-update.md"
    argv = [sys.executable, "-m", "narthex", "trace", "10.244.1.9", "10.96.31.6:80", "--rules", report, "-o", "svg"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert (ROOT / "docs" / "pictures" / "docker-update.svg").read_text() == done.stdout
    for page in (ROOT / "README.md", ROOT / "README.zh-CN.md"):
        assert " ".join(argv[3:-2]) in page.read_text()


def test_the_page_of_the_labs_api_names_every_kind():
    from narthex.lab.api.kinds import KINDS

    text = (ROOT / "docs" / "reference" / "lab-api.md").read_text()
    assert [kind.name for kind in KINDS.values() if not re.search(rf"\b{kind.kind}\b", text)] == []


def behaviours_page():
    spec = importlib.util.spec_from_file_location("behaviours_page", ROOT / "scripts" / "behaviours_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_behaviours_is_up_to_date():
    page = ROOT / "docs" / "reference" / "behaviours.md"
    assert page.read_text() == behaviours_page().page(), "run `python scripts/behaviours_page.py`"


def test_every_cited_row_is_explained():
    known = {row.number for rows in behaviours_page().behaviours().values() for row in rows}
    number = r"(?:\d{1,2}\.\d{1,2}|[DSCFLMA]\d{1,2})"
    cited = re.compile(rf"\b[Rr]ows? ({number}(?:(?:,? and |, | to |-){number})*)")
    unknown = []
    for path in sorted(
        file for kind in ("src", "tests", "docs") for file in (ROOT / kind).rglob("*") if file.is_file()
    ):
        if path.suffix in (".py", ".md", ".yaml"):
            for rows in cited.findall(path.read_text()):
                unknown += [f"{path}: row {row}" for row in re.findall(number, rows) if row not in known]
    assert not unknown, "\n".join(unknown)
