"""Issue texts of what tools printed for the rules of kube-proxy and others: real chains, comments, sets, and plugins' rules."""

from pathlib import Path

import pytest
from tests.trace.issue.drawn_bundles import facts

from narthex.trace.issue.text import IssueQuestion, IssueTextError
from narthex.trace.node.layout import BundleManifest
from narthex.trace.program.bundle import Bundle
from narthex.trace.program.issue import make_issue

DUMPS = Path(__file__).parents[2] / "dumps"
PARTS = {
    "iptables-save": "rules/iptables-nft.txt",
    "iptables-nft-save": "rules/iptables-nft.txt",
    "iptables-legacy-save": "rules/iptables-legacy.txt",
    "nft-list": "rules/nft.txt",
    "nft-list-a": "rules/nft.txt",
}
QUESTIONS = (
    ("10.64.1.200", "10.96.0.10:53/udp"),
    ("10.64.1.9", "198.51.100.1:80"),
    ("outside", "10.20.0.11:30080"),
    ("10.244.1.9", "10.96.0.1:443"),
    ("10.20.0.11", "10.96.0.20:80"),
)
FILES = sorted(path for path in DUMPS.iterdir() if path.suffix[1:] in PARTS)


def taken(path, text):
    return [Bundle(origin="x", table=BundleManifest(node="n", writer="test"), parts={**facts(), path: text})]


@pytest.mark.parametrize("key", [None, b"a key"], ids=["as it is", "anonymized"])
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_text_gives_the_same_answer(file, key):
    for source, destination in QUESTIONS:
        question = IssueQuestion(source=source, destination=destination)
        assert make_issue(question, taken(PARTS[file.suffix[1:]], file.read_text()), key).whole == ()


def test_rules_in_json_are_not_anonymized():
    text = (DUMPS / "kube-proxy.nft-json").read_text()
    question = IssueQuestion(source="10.64.1.9", destination="10.96.0.1:443")
    assert make_issue(question, taken("rules/nft.txt", text)).whole == ()
    with pytest.raises(IssueTextError, match="is JSON, in which nothing can be replaced"):
        make_issue(question, taken("rules/nft.txt", text), b"a key")
