"""The page's side of Python, natively: it answers as the command, with the same messages and exit status."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.playground.inputs import GALLERY, examples

from narthex.cli import main
from narthex.cli.trace import NOT_KNOWN
from playground_answer import answer, answer_json

CAUSES = {
    "no-endpoints": "no-endpoints",
    "selector": "selector-matches-nothing",
    "local": "local-policy",
    "forward-drop": "forward-drop",
    "lost-match": "old-iptables",
    "hairpin": "missing-hairpin",
    "source-ranges": "source-range",
    "two-iptables": "two-iptables",
    "ipvs-local": "no-endpoints",
    "firewalld": None,
}
"""The first cause of each famous bug; None where rules alone do not decide."""


def test_each_example_shows_what_it_tells(tmp_path):
    for example in examples():
        answered = answer(example, tmp_path / "input", ("json",))
        assert answered["status"] in (0, NOT_KNOWN), (example["id"], answered)
        found = json.loads(answered["output"]["json"])
        if example["group"] == "bugs":
            causes = [finding["cause"] for finding in found["findings"]]
            assert causes[:1] == [each for each in [CAUSES[example["id"]]] if each], (example["id"], causes)
        else:
            assert {end["fate"] for end in found["ends"]} <= {"delivered", "leaves"}
        for words in ("title", "about", "story"):
            assert set(example[words]) == {"en", "zh"}
            assert all(example[words].values())
    assert {example["id"] for example in examples() if example["group"] == "bugs"} == set(CAUSES)


def test_every_file_of_the_gallery_is_used():
    used = {name for example in json.loads((GALLERY / "gallery.json").read_text()) for name in example["files"]}
    assert used == {path.name for path in GALLERY.iterdir()} - {"gallery.json"}


@pytest.mark.parametrize("format", ["json", "html"])
def test_it_prints_what_the_command_prints(tmp_path, monkeypatch, format):
    for example in examples():
        answered = answer(example, tmp_path / "input", (format,))
        monkeypatch.chdir(tmp_path / "input")
        done = CliRunner().invoke(main, ["trace", "-o", format, *answered["arguments"]])
        assert (done.exit_code, done.stdout, done.stderr) == (
            answered["status"],
            answered["output"][format],
            answered["messages"],
        )
        monkeypatch.chdir(tmp_path)


def test_an_error_has_the_message_of_the_command(tmp_path):
    request = {"source": "here", "destination": "there", "options": {}, "files": [("a.txt", "*nat\nCOMMIT\n")]}
    answered = answer(request, tmp_path / "input")
    assert answered["output"] == {}
    assert answered["status"] == 1
    assert answered["messages"].startswith("Error: there is no 'here'")


def test_a_bundle_is_read(tmp_path):
    folder = tmp_path / "narthex-bundle"
    (folder / "rules").mkdir(parents=True)
    (folder / "manifest.tsv").write_text("format\t1\tworker-1\ttest\ntaken\trules/iptables.txt\tiptables-save\t\n")
    shutil.copyfile(GALLERY / "no-endpoints.iptables-save", folder / "rules" / "iptables.txt")
    archive = Path(shutil.make_archive(str(tmp_path / "node"), "gztar", tmp_path, "narthex-bundle"))
    request = {"source": "outside", "destination": "192.168.60.11:31218", "options": {"node-ip": "192.168.60.11"}}
    named = json.dumps({**request, "files": ["node.tar.gz"]})
    answered = json.loads(answer_json(named, [archive.read_bytes()], str(tmp_path / "input")))
    assert answered["arguments"][:2] == ["--bundle", "node.tar.gz"]
    assert json.loads(answered["output"]["json"])["findings"][0]["cause"] == "no-endpoints"
