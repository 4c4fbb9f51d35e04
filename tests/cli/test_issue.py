"""`narthex bundle --for-issue`, and `narthex trace` of what it printed."""

import json

import pytest
from click.testing import CliRunner
from tests.trace.issue.drawn_bundles import bundle, objects

from narthex.cli import main
from narthex.model import ServicePort
from narthex.testing.build import CONFIG, endpoint, endpoint_slice, service, snapshot
from narthex.trace.program.bundle import write_file

MODES = ("nftables", "iptables", "ipvs", "userspace")
SECRET_NAMES = ("acme-billing", "ledger", "worker-a", "worker-b", "payroll")


def written(path, mode, count=0):
    """A bundle with Services of a company, and `count` others."""
    web = ServicePort(name="payroll", port=80, node_port=30080)
    made = [
        service("acme-billing/ledger", "10.110.0.1", ports=(web,)),
        endpoint_slice("acme-billing/ledger", endpoint("10.64.1.10", target="ledger-0"),
                       endpoint("10.64.2.10", "worker-b", target="ledger-1"), port=8080),
    ]  # fmt: skip
    for number in range(count):
        name = f"acme-billing/other-{number}"
        made += [
            service(name, f"10.110.{1 + number // 200}.{number % 200 + 1}"),
            endpoint_slice(
                name, *(endpoint(f"10.64.{1 + n}.{number % 200 + 20}", ("worker-a", "worker-b")[n]) for n in range(2))
            ),
        ]
    snap = snapshot(*made)
    taken = bundle(snap, CONFIG, mode, objects(snap))
    write_file(path, taken.table, taken.parts)
    return sum(len(text.encode()) for text in taken.parts.values())


def run(*words, status=0):
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == status, done.output
    return done.stdout


@pytest.mark.parametrize("options", [[], ["--anonymize"]], ids=["as it is", "anonymized"])
@pytest.mark.parametrize("mode", MODES)
def test_a_text_of_a_thousand_services_is_small_and_says_the_same(mode, options, tmp_path):
    size = written(tmp_path / "node.tgz", mode, 1000)
    question = ("acme-billing/ledger-0", "acme-billing/ledger")
    text = run("bundle", "--for-issue", *question, "--bundle", tmp_path / "node.tgz", *options)
    assert len(text.encode()) < 0.05 * size
    if options:
        assert not [name for name in (*SECRET_NAMES, "10.64.1.10", "10.110.0.1") if name in text]
    (tmp_path / "issue.md").write_text(f"Hello\n\n{text}\nThanks\n")
    expected = json.loads(run("trace", *question, "--bundle", tmp_path / "node.tgz", "-o", "json"))
    found = json.loads(run("trace", "--bundle", tmp_path / "issue.md", "-o", "json"))
    assert [(end["fate"], end["probability"]) for end in found["ends"]] == [
        (end["fate"], end["probability"]) for end in expected["ends"]
    ]
    assert [each["cause"] for each in found["findings"]] == [each["cause"] for each in expected["findings"]]
    if not options:
        assert found["service"] == expected["service"] == "acme-billing/ledger:payroll"


def test_sender_and_destination_can_be_given_and_rules_are_as_good_as_a_bundle(tmp_path):
    written(tmp_path / "node.tgz", "iptables")
    run(
        "bundle",
        "--for-issue",
        "outside",
        "10.20.0.11:30080",
        "--bundle",
        tmp_path / "node.tgz",
        "-o",
        tmp_path / "issue.md",
    )
    assert "outside" in run("trace", "--rules", tmp_path / "issue.md")
    said = run("trace", "10.64.1.77", "10.20.0.11:30080", "--bundle", tmp_path / "issue.md")
    assert "10.64.1.77" in said
    done = CliRunner().invoke(main, ["trace", "10.64.1.77", "--bundle", str(tmp_path / "issue.md")])
    assert done.exit_code == 2
    assert (
        "Missing argument 'DST[:PORT][/PROTO]'. A text of `narthex bundle --for-issue` names SRC and DST" in done.output
    )


def test_names_of_the_clusters_dns_stay_consistent(tmp_path):
    written(tmp_path / "node.tgz", "nftables")
    question = ("acme-billing/ledger-0", "ledger.acme-billing.svc:80")
    text = run("bundle", "--for-issue", *question, "--bundle", tmp_path / "node.tgz", "--anonymize")
    (tmp_path / "issue.md").write_text(text)
    head = text.split("\n")[1]
    assert head.endswith(".svc:80")
    assert not [name for name in SECRET_NAMES if name in text]
    found = json.loads(run("trace", "--bundle", tmp_path / "issue.md", "-o", "json"))
    assert found["lookup"][-1]["answer"] == found["destination"]["address"]


def test_as_a_document(tmp_path):
    written(tmp_path / "node.tgz", "iptables")
    document = json.loads(
        run("bundle", "--for-issue", "outside", "10.20.0.11:30080", "--bundle", tmp_path / "node.tgz", "-o", "json")
    )
    assert (document["kind"], document["version"], document["whole"]) == ("issue", 1, [])
    assert document["text"].startswith("```text\nnarthex-issue 1: narthex trace outside 10.20.0.11:30080\n")


@pytest.mark.parametrize("words", [["--anonymize"], ["--bundle", "x.tgz"]])
def test_options_of_issue_texts_need_a_question(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.tgz").touch()
    done = CliRunner().invoke(main, ["bundle", *words])
    assert done.exit_code == 2
    assert "--for-issue" in done.output


def test_a_text_that_is_cut_off_is_an_error(tmp_path):
    written(tmp_path / "node.tgz", "iptables")
    text = run("bundle", "--for-issue", "outside", "10.20.0.11:30080", "--bundle", tmp_path / "node.tgz")
    (tmp_path / "issue.md").write_text(text[: len(text) // 2])
    done = CliRunner().invoke(main, ["trace", "--bundle", str(tmp_path / "issue.md")])
    assert done.exit_code == 1
    assert "issue.md: the line `=== end` is missing: the text is cut off" in done.output
