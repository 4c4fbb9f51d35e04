"""Limits of the parsers of foreign text, and that the user is told when one took effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from narthex.dns.corefile.parse import MAX_TEXT, CorefileError
from narthex.dns.corefile.parse import parse as parse_corefile
from narthex.dns.server.resolv_conf import upstreams_of_file
from narthex.kube.access import Access, AccessError, open_connection
from narthex.model.decode.objects import MAX_BROKEN, load
from narthex.model.lines import MAX_LINE
from narthex.model.problem import MAX_PROBLEMS, BoundedProblems
from narthex.netfilter.ast import Unknown
from narthex.netfilter.dump.read import MAX_DUMP_LINE, MAX_TABLES, read_dump
from narthex.runtime.configuration.file import parse as parse_configuration
from narthex.runtime.configuration.values import ClientConnection
from narthex.trace.node.layout import BundleManifest
from narthex.trace.node.view import view_of_bundle, view_of_files
from narthex.trace.program import bundle

MANY = MAX_PROBLEMS + 500
LONG = "x" * MAX_LINE


def test_a_list_of_problems_keeps_the_first_and_counts_the_others() -> None:
    kept: BoundedProblems[str] = BoundedProblems(lambda count: f"{count} more", most=2)
    assert not kept
    kept.extend("abcd")
    assert kept
    assert [*kept] == ["a", "b", "2 more"]


def test_a_long_rule_is_reported_and_not_parsed() -> None:
    dump = read_dump(f"*nat\n:A - [0:0]\n-A A -s 10.0.0.1 -m comment --comment {LONG} -j B\n-A A -j C\nCOMMIT\n")
    (problem,) = dump.problems
    assert problem.line == 3
    assert f"longer than {MAX_LINE} characters" in problem.text
    (first,), second = (rule.expressions for rule in dump.tables[0].table.chains["A"].rules)
    assert isinstance(first, Unknown)
    assert len(first.text) < 300
    assert second


def test_a_long_line_of_a_listing_is_not_parsed() -> None:
    listing = f"Chain A (1 references)\ntarget prot opt source destination\nB tcp -- 0.0.0.0/0 0.0.0.0/0 /* {LONG} */\n"
    assert any("not understood" in problem.text for problem in read_dump(listing).check())


def test_a_line_longer_than_any_tool_prints_is_reported() -> None:
    dump = read_dump("*nat\nCOMMIT\n" + "x" * (MAX_DUMP_LINE + 1))
    assert [(problem.line, "not read" in problem.text) for problem in dump.problems] == [(3, True)]


def test_problems_of_a_dump_are_limited() -> None:
    dump = read_dump("*nat\n" + "nonsense\n" * MANY + "COMMIT\n")
    assert len(dump.problems) == MAX_PROBLEMS + 1
    assert dump.problems[-1].text.startswith("500 more problems")
    unknown = read_dump("*nat\n:A - [0:0]\n" + "-A A -m nonsense -j B\n" * MANY + "COMMIT\n")
    assert len(unknown.check()) == MAX_PROBLEMS + 1


def test_tables_of_a_dump_are_limited() -> None:
    dump = read_dump("*nat\nCOMMIT\n" * (MAX_TABLES + 5))
    assert len(dump.tables) == MAX_TABLES
    assert any("the rest is not read" in problem.text for problem in dump.problems)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"nftables": [{"rule": {"expr": ' + "[" * 100_000])
def test_deep_nesting_ends_no_reader(text: str) -> None:
    assert read_dump(text).problems
    with pytest.raises(ValueError, match="nothing that is known"):
        view_of_files([("a", text)])


def test_many_chains_in_one_line_each_end_no_reader() -> None:
    found = read_dump("table ip a {\n" + "chain b { accept }\n" * 100_000 + "}\n").tables
    assert [*found[0].table.chains] == ["b"]


def test_a_probability_with_a_huge_exponent_is_not_computed() -> None:
    rule = "-A A -m statistic --mode random --probability 1e-999999999 -j B\n"
    assert any("1e-999999999" in str(problem) for problem in read_dump(f"*nat\n:A - [0:0]\n{rule}COMMIT\n").check())


def test_ranges_that_multiply_are_not_expanded() -> None:
    worst = "::1-ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe"
    elements = " . ".join([worst] * 4)
    text = f"table ip6 a {{\n\tset b {{\n\t\ttype {' . '.join(['ipv6_addr'] * 4)}\n\t\telements = {{ {elements} }}\n\t}}\n}}\n"
    assert any("set b: not understood" in str(problem) for problem in read_dump(text).check())


def test_long_lines_of_a_bundle_are_reported() -> None:
    parts = {"net/sysctls.txt": f"net.a = {LONG}\nnet.b = 1\n"}
    view = view_of_bundle(parts, BundleManifest(node="n", writer="w"), "bundle")
    assert view.sysctls == {"net.b": "1"}
    assert view.partial == (f"net/sysctls.txt: line 1: longer than {MAX_LINE} characters, not read",)


def test_a_bundle_that_unpacks_to_far_more_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "node.tgz"
    with path.open("wb") as stream:
        bundle.write(stream, BundleManifest(node="n", writer="w"), {"net/sysctls.txt": " " * (bundle.LEAST_LIMIT + 1)})
    with pytest.raises(bundle.BundleError, match="holds more than 64 MiB"):
        bundle.read_bundle(path)


def test_long_lines_of_files_of_a_node_are_reported() -> None:
    view = view_of_files([("a.txt", f"default via 10.0.0.1 dev eth0\nnet.a = {LONG}\n")])
    assert view.partial == (f"a.txt: line 2: longer than {MAX_LINE} characters, not read",)


@pytest.mark.parametrize("document", [b'{"a":1}', b"a: 1\n---\n"])
def test_a_file_of_something_else_is_not_read_to_its_end(document: bytes) -> None:
    loaded = load(document * (MAX_BROKEN + 10), "a.json")
    assert "the rest of the file is not read" in str(loaded.problems[0])
    assert len(loaded.problems) <= MAX_PROBLEMS + 2
    assert not loaded.whole


def test_a_corefile_is_limited() -> None:
    with pytest.raises(CorefileError, match="more problems"):
        parse_corefile(". {\n" + "".join(f"nonsense{number}\n" for number in range(MANY)) + "}\n")
    with pytest.raises(CorefileError, match="nested more than"):
        parse_corefile("a {\n" * 5000)
    with pytest.raises(CorefileError, match="lines with all imports"):
        parse_corefile("(a) {\n" + "log\n" * 1000 + "}\n. {\n" + "import a\n" * 900 + "}\n")
    with pytest.raises(CorefileError, match="the limit is"):
        parse_corefile("#" * (MAX_TEXT + 1))


def test_warnings_of_a_configuration_are_limited() -> None:
    head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    _, warnings = parse_configuration((head + "mode: iptables\n" * (MANY + 1)).encode(), "a.yaml")
    assert len(warnings) == MAX_PROBLEMS + 1
    assert "500 more problems" in str(warnings[-1])


def test_a_large_kubeconfig_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("#" * (5 << 20))
    with pytest.raises(AccessError, match="larger than 4 MiB"):
        open_connection(Access(connection=ClientConnection(kubeconfig=str(path))))


def test_long_lines_of_a_resolv_conf_are_reported() -> None:
    said: list[str] = []
    found = upstreams_of_file("/r", f"search {LONG}\nnameserver 10.0.0.1\n", (), said.append)
    assert [each.address for each in found] == ["10.0.0.1"]
    assert said == [f"/r: line 1: longer than {MAX_LINE} characters, not read"]
