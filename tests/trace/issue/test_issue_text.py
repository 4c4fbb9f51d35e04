"""An issue text survives what trackers, mails, and people do to it, and nothing in it becomes markup."""

import textwrap

import pytest

from narthex.trace.issue.text import (
    IssueNode,
    IssueQuestion,
    IssueText,
    IssueTextError,
    harmless,
    is_issue_text,
    issue_text,
    read_issue_text,
)
from narthex.trace.node.pasted import PastedKind, sort_pasted

QUESTION = IssueQuestion(
    source="shop/client", destination="shop/web:80/tcp", node="node-1", iif="cni0", source_port=4000, size=1500,
    domain="corp.internal", node_ips=("10.0.0.5", "fd00::5"),
)  # fmt: skip
CONTENT = IssueText(
    question=QUESTION,
    nodes=(
        IssueNode(
            node="node-1",
            parts={
                "rules/nft.txt": "table ip x {\n\tchain c {\n\t\taccept\n\t}\n}\n",
                "net/routes-4.json": "[]\n",
                "rules/ipset.txt": "=== end\n",
            },
            failed={"rules/iptables-nft.txt": "exit status 1; it's 'odd'"},
        ),
        IssueNode(node="", parts={"net/links.json": "[]\n"}),
    ),
)
TEXT = issue_text(CONTENT)


def test_what_is_written_is_read():
    assert TEXT.startswith(
        "```text\nnarthex-issue 1: narthex trace shop/client shop/web:80/tcp --node node-1 --iif cni0 "
    )
    assert TEXT.endswith("\n```\n")
    assert read_issue_text(TEXT) == CONTENT


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: textwrap.indent(text, "    "),
        lambda text: textwrap.indent(text, "> ", lambda _line: True),
        lambda text: textwrap.indent(text, "> > ", lambda _line: True),
        lambda text: (
            f"\ufeffIt does not work.\n\n1. Look:\n\n{textwrap.indent(text, '   ')}\nPlease help, @everyone\n```\nmore\n```\n"
        ),
        lambda text: text.replace("```text\n", "").replace("```", ""),
    ],
    ids=["CRLF", "indented", "quoted", "quoted twice", "in a report", "without its fence"],
)
def test_it_survives_being_pasted(change):
    pasted = change(TEXT)
    assert is_issue_text(pasted)
    assert read_issue_text(pasted) == CONTENT
    (found,) = sort_pasted([("report.md", pasted)])
    assert found.kind is PastedKind.BUNDLE


HOSTILE = ("a```\n# b", "\x1b[31mred\x1b]0;title\x07", "<script>alert(1)</script>", "[x](javascript:alert(1))", "\u202egnp.exe", "~~~",
           "=== end", "narthex-issue 1: narthex trace a b", "a\x00b\x85c\u2028d", "`", "````text")  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_nothing_leaves_the_fence(name):
    content = IssueText(
        question=IssueQuestion(source=name, destination="b"),
        nodes=(IssueNode(node=name, parts={"rules/nft.txt": f"{name}\n"}, failed={"rules/ipset.txt": name}),),
    )
    text = issue_text(content)
    lines = text.split("\n")
    assert (lines[0], lines[-2], lines[-1]) == ("```text", "```", "")
    assert not any("`" in line for line in lines[1:-2])
    assert all(line.replace("\t", "").isprintable() for line in lines)
    read = read_issue_text(text)
    assert [list(node.parts) for node in read.nodes] == [["rules/nft.txt"]]


def test_equal_names_stay_equal():
    assert harmless("a`b\x1b\tc") == "a\ufffdb\ufffd\tc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("=== end\n```", ""), "the text is cut off"),
        (
            lambda text: text.replace("narthex-issue 1:", "narthex-issue 2:"),
            "has format 2; this version reads format 1",
        ),
        (lambda text: text.replace("net/routes-4.json", "../../etc/passwd"), "is not understood"),
        (lambda text: text.replace("net/routes-4.json", "rules/nft.txt"), "is in it twice"),
        (lambda text: text.replace("--size 1500", "--live x"), "has the option '--live', which no issue text has"),
        (lambda text: text.replace("--size 1500", "--size 1e9"), "is no number"),
        (
            lambda text: text.replace("narthex trace shop/client", "rm -rf shop/client"),
            "is not `narthex trace SRC DST`",
        ),
        (lambda text: text.replace("=== node node-1", "=== other node-1"), "is not understood"),
    ],
)
def test_what_is_no_issue_text_is_refused(change, message):
    with pytest.raises(IssueTextError) as caught:
        read_issue_text(change(TEXT))
    assert message in str(caught.value)
