"""The walks of `walks.yaml`: their commands are typed in labs, the answers compared, and the page written."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]
from tests.lab.api import kubectls
from tests.lab.kernel.lab_cluster import ENVIRONMENT, LabCluster, running

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs/reference/debug-commands.md"
PATIENCE = 60.0
"""Answers follow what the commands before them changed."""
_PAUSE = 0.05
_MARK = "--- end of answer"
_VARIABLE = re.compile(r"\$([a-z]+[0-9]?)")

HEAD = """\
# Commands to debug a Service network

Which commands tutorials about kube-proxy type, and what they show in a lab. `tests/lab/debug_commands/walks.yaml` has the commands;
`scripts/debug_commands_page.py` writes this page. Tests start labs, type each command, and compare the answer with the lines here,
whatever the spaces between words. `$name` is a word that an answer contains; a later command or answer with the same name has the
same word.

`at` says where the command is typed: "you" is this machine, with the lab's kubectl (`eval "$(narthex lab env)"`), everything else is a
shell there (`narthex lab exec node-1 -- bash`). "as shown" means that the lab answers what tutorials show; otherwise the last column
says why not.
"""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command."""

    at: str
    command: str
    shows: str = ""
    lacks: tuple[str, ...] = ()
    differs: str = ""
    run: str = ""
    """What a test runs instead of the command, which needs a network or a program that a machine for tests may lack."""
    terminal: bool = False


class Walk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Commands in their order."""

    title: str
    about: str
    mode: str
    steps: tuple[Step, ...]
    options: tuple[str, ...] = ()


def walks(mode: str = "") -> list[Walk]:
    """All walks, or those of one mode."""
    found = msgspec.convert(yaml.safe_load((HERE / "walks.yaml").read_text()), list[Walk])
    return [each for each in found if mode in ("", each.mode)]


def walk_in_lab(mode: str) -> None:
    """Start a lab of a mode, and type all commands of its walks. Raises AssertionError with the first answer that is wrong."""
    type_in_lab(mode, walks(mode), HERE)


def type_in_lab(mode: str, there: Sequence[Walk], directory: Path) -> None:
    """Start a lab with the `manifests` of a directory, and type the commands of walks in its directory `typed`."""
    (options,) = {each.options for each in there}
    with (
        running(mode, "--mode", mode, *options, directory=directory / "manifests") as cluster,
        contextlib.closing(Places(cluster, directory / "typed")) as places,
    ):
        for walk in there:
            known: dict[str, str] = {}
            for step in walk.steps:
                known |= _typed(step, places, known)


def _typed(step: Step, places: "Places", known: dict[str, str]) -> dict[str, str]:
    """Type a command until its answer is right; return the words that it names."""
    end = time.monotonic() + PATIENCE
    command = filled(step.run or step.command, known)
    while True:
        answer = places.type(filled(step.at, known), command, step.terminal)
        found = matched(answer, step.shows.splitlines(), known)
        if found is not None and not any(each in answer for each in step.lacks):
            return found
        assert time.monotonic() < end, f"{step.at}: {command}\n{answer}\nshould show:\n{step.shows}"
        time.sleep(_PAUSE)


def filled(text: str, known: dict[str, str]) -> str:
    """A text with the known variables replaced."""
    return _VARIABLE.sub(lambda found: known.get(found[1], found[0]), text)


def matched(answer: str, shows: Sequence[str], known: dict[str, str]) -> dict[str, str] | None:
    """The words for the variables if the answer has all lines, None if it lacks one. No line counts twice."""
    lines = [" ".join(line.split()) for line in answer.splitlines()]
    words: dict[str, str] = {}
    for template in shows:
        pattern = _pattern(template, known | words)
        found = next((match for line in lines if (match := pattern.fullmatch(line))), None)
        if found is None:
            return None
        lines.remove(found[0])
        words |= found.groupdict()
    return words


def _pattern(template: str, known: dict[str, str]) -> re.Pattern[str]:
    parts, seen, begin = [], set(), 0
    text = " ".join(template.split())
    for variable in _VARIABLE.finditer(text):
        name = variable[1]
        parts.append(re.escape(text[begin : variable.start()]))
        new = name in _ANY or (name not in known and name not in seen)
        parts.append(".+" if name == "rest" else r"\S+" if name in _ANY else f"(?P<{name}>\\S+)" if new else "")
        if not new:
            parts[-1] = re.escape(known[name]) if name in known else f"(?P={name})"
        seen.add(name)
        begin = variable.end()
    return re.compile("".join((*parts, re.escape(text[begin:]))))


_ANY = frozenset({"age", "all", "count", "client", "rest", "tcp"})
"""Variables that stand for another word each time; `rest` for all that follows."""


class Places:
    """Where commands are typed: one shell for each place, and one more for each command with a terminal."""

    def __init__(self, cluster: LabCluster, directory: Path) -> None:
        """`directory` is where commands are typed."""
        self._directory = directory
        tools = str(kubectls.kubectl(kubectls.DEBIAN).parent)
        self._environment = {**cluster.environment, "PATH": f"{tools}:{ENVIRONMENT['PATH']}"}
        self._cluster = cluster
        self._shells: dict[str, subprocess.Popen[str]] = {}

    def type(self, place: str, command: str, terminal: bool) -> str:
        """Type a command, and return what it prints."""
        if terminal:
            return self._in_terminal(command)
        shell = self._shells.get(place) or self._shells.setdefault(place, self._open(place))
        assert shell.stdin is not None and shell.stdout is not None
        shell.stdin.write(f"{{ {command}\n}} 2>&1 </dev/null; echo; echo '{_MARK}'\n")
        shell.stdin.flush()
        lines = iter(shell.stdout.readline, f"{_MARK}\n")
        return "".join(self._checked(line, place) for line in lines)

    def close(self) -> None:
        """End the shells."""
        for shell in self._shells.values():
            shell.communicate("exit\n", timeout=PATIENCE)

    def _open(self, place: str) -> subprocess.Popen[str]:
        into = [sys.executable, "-m", "narthex", "lab", "exec", "--name", self._cluster.name, place, "--"]
        argv = [*(into if place != "you" else ()), "sh"]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=self._environment, cwd=self._directory, stdin=pipe, stdout=pipe, text=True)

    @staticmethod
    def _checked(line: str, place: str) -> str:
        assert line, f"the shell on {place} has ended"
        return line

    def _in_terminal(self, command: str) -> str:
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as output:
            with os.fdopen(theirs) as ends:
                process = subprocess.Popen(
                    ["sh", "-c", command], env=self._environment, stdin=ends, stdout=ends, stderr=ends
                )
            answer = b""
            # Reading a terminal that nobody has open any more fails.
            with contextlib.suppress(OSError):
                while part := output.read(65536):
                    answer += part
            process.wait(PATIENCE)
        return answer.decode()


def page() -> str:
    """The page, of all walks."""
    return HEAD + "".join(part for walk in walks() for part in _section(walk))


def _section(walk: Walk) -> Iterator[str]:
    options = " ".join(("--mode", walk.mode, *walk.options))
    yield f"\n## {walk.title}\n\n{walk.about} `narthex lab up tests/lab/debug_commands/manifests {options}`\n\n"
    yield "| at | command | a lab shows | compared with tutorials |\n| --- | --- | --- | --- |\n"
    for step in walk.steps:
        lines = [
            *(_code(each) for each in step.shows.splitlines()),
            *(f"no line with {_code(each)}" for each in step.lacks),
        ]
        shown = "<br>".join(lines)
        yield f"| {step.at.replace('$', '`$') + '`' if '$' in step.at else step.at} | {_code(step.command)} | {shown} | {step.differs.strip() or 'as shown'} |\n"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"
