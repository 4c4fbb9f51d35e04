"""`narthex query`, `narthex diff --prove`, and `narthex migrate --prove`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from narthex.cli import main
from narthex.cli.query import _examples
from narthex.trace.query.question import FORMS

ROOT = Path(__file__).parents[2]
DUMP = str(ROOT / "examples" / "bug-report" / "shop-node-a.txt")
OBJECTS = ["--manifests", str(ROOT / "examples" / "shop"), "--node", "node-a", "--cluster-cidr", "10.244.0.0/16"]


def run(*words):
    done = CliRunner().invoke(main, words)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.words)
def test_each_form_is_answered_within_80_columns(form):
    question = form.example.replace("10.244.2.7:8080", "10.244.2.20:9000")
    status, out, err = run("query", question, *OBJECTS)
    assert (status, err) == (0, "")
    assert out.startswith("node node-a, IPv4, by objects, as mode nftables implements them:\n")
    assert "hold" in out
    assert max(map(len, out.splitlines())) <= 80


def test_rules_that_differ_from_objects():
    status, out, _ = run("query", "where does shop/web from pods go?", *OBJECTS, "--rules", DUMP)
    assert status == 1
    assert "(only the objects say so)" in out
    assert "Rules and objects differ." in out


def test_unknown_questions_list_the_forms_and_the_nearest_one():
    status, _, err = run("query", "who can talk to shop/web?", *OBJECTS)
    assert status == 2
    assert "The nearest form: who reaches TARGET [from SENDER]?" in err
    assert all(form.words in err for form in FORMS)


def test_rules_without_the_nodes_addresses_are_no_certain_answer():
    status, out, _ = run("query", "what can outside reach?", "--rules", DUMP)
    assert status == 2
    assert "undecided: rules" in out
    assert "--node-ip" in out
    certain, _, _ = run("query", "what can outside reach?", "--rules", DUMP, "--node-ip", "192.168.49.11")
    assert certain == 0


def test_pods_need_to_be_known(tmp_path):
    (tmp_path / "rules.txt").write_text("*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n")
    status, _, err = run("query", "what can outside reach?", "--rules", str(tmp_path / "rules.txt"))
    assert status == 2
    assert "give --cluster-cidr" in err


def test_colors_and_completion():
    _, out, _ = run("query", "what is refused?", *OBJECTS, "--color", "always")
    assert "\x1b[" in out
    assert _examples(None, None, "which") == ["which Services can leave this node without masquerade?"]


def test_all_lines_are_listed_on_request():
    words = ("diff", "--prove", DUMP, "iptables", *OBJECTS, "-o", "json")
    few, every = (json.loads(run(*words, *more)[1]) for more in ((), ("--all",)))
    assert few["reports"][0]["changes"] == every["reports"][0]["changes"]
    assert every["reports"][0]["more"] == 0


@pytest.mark.parametrize("before, after, status", [("iptables", "nftables", 3), ("nftables", "nftables", 0), ("nftables", "ipvs", 2)])  # fmt: skip
def test_proved_migrations(before, after, status):
    found, out, _ = run("migrate", "--prove", "--from", before, "--to", after, *OBJECTS)
    assert found == status
    verdict = {
        0: "no packet changes its outcome (proved for all 2^120 packets of IPv4)",
        2: "undecided",
        3: "classes of",
    }
    assert verdict[status] in out


def test_prove_and_text_exclude_each_other():
    status, _, err = run("diff", "--prove", "--text", DUMP, DUMP)
    assert status == 2
    assert "--prove and --text exclude each other" in err
