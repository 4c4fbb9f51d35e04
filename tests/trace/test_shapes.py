"""What people paste: the rules of four kube-proxy versions in the prints of every tool. Each answer is right or says what is missing.

The texts are those of `kube_proxy_layouts`. A shape is a way to print and to cut them. `MISSING` names, for the shapes that
lack something, the words that the answer contains.
"""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trace import kube_proxy_layouts as layouts
from tests.trace.kube_proxy_layouts import CLIENT, DNS, EMPTY, NODE, NODE_PORT, POD, VERSIONS, WEB

from narthex.model.net import IPFamily
from narthex.model.store import Snapshot
from narthex.netfilter.dump.read import GapKind
from narthex.trace.causes.find import find
from narthex.trace.model import Fate
from narthex.trace.node.view import view_of_files
from narthex.trace.program.travel import KnownCluster, TraceRequest, travel
from narthex.trace.render.text import text as rendered

TABLES = {"mangle": lambda _: layouts.mangle(), "filter": layouts.filter_, "nat": layouts.nat}
PROMPTS = ("root@node-1:~# ", "/ # ", "[root@node-1 ~]$ ", "node-1% ", "bash-5.1$ sudo ", "PS /root> ", "> ")


def lines_with(text, word):
    return "".join(line for line in text.splitlines(keepends=True) if word in line)


def commands(version, options, printed, prompt):
    return "".join(f"{prompt}iptables -t {name} {options}\n{printed(table(version))}" for name, table in TABLES.items())


def listing(version, options, prompt, **form):
    return commands(version, options, lambda table: layouts.listing_of(table, **form) + "\n", prompt)


def of_iptables_nft(version, **form):
    return "\n".join(layouts.as_nft(table(version), **form) for table in TABLES.values())


SHAPES = {
    "save": lambda v, _: layouts.saved(v),
    "save behind a prompt": lambda v, p: f"{p}iptables-save\n{layouts.saved(v)}",
    "save in journald": lambda v, _: "".join(f"Jan 06 10:00:00 node-1 dump[7]: {x}\n" for x in layouts.saved(v).splitlines()),
    "-S": lambda v, p: commands(v, "-S", layouts.rules_of, p),
    "-S without prompts": lambda v, _: "".join(layouts.rules_of(table(v)) for table in TABLES.values()),
    "-nL": lambda v, p: listing(v, "-nL", p),
    "-nvL": lambda v, p: listing(v, "-nvL", p, verbose=True),
    "-L": lambda v, p: listing(v, "-L", p, names=True),
    "-L without prompts": lambda v, _: "\n".join(layouts.listing_of(table(v), names=True) for table in TABLES.values()),
    "two families": lambda v, p: commands(v, "-S", layouts.rules_of, p)
    + layouts.six(commands(v, "-S", layouts.rules_of, p).replace("iptables -t", "ip6tables -t")),
    "two families without prompts": lambda v, _: (
        (one := "".join(layouts.rules_of(table(v)) for table in TABLES.values())) + layouts.six(one)
    ),
    "save and listing": lambda v, p: layouts.saved(v) + f"{p}iptables -t nat -nL\n" + layouts.listing_of(layouts.nat(v)),
    "grep": lambda v, p: f"{p}iptables-save | grep SERVICE\n" + lines_with(layouts.saved(v), "SERVICE"),
    "one table": lambda v, p: f"{p}iptables -t nat -S\n" + layouts.rules_of(layouts.nat(v)),
    "nft of iptables-nft": lambda v, p: f"{p}nft list ruleset\n" + of_iptables_nft(v),
    "nft without a decoder": lambda v, p: f"{p}nft list ruleset\n" + of_iptables_nft(v, decoded=False),
    "legacy": lambda v, p: f"{p}iptables-legacy-save\n" + layouts.saved(v, "legacy").replace("v1.8.9 (legacy)", "v1.8.9"),
}  # fmt: skip
NFT = {
    "nft": lambda _: layouts.nftables(),
    "nft behind a prompt": lambda p: f"{p}nft list ruleset\n{layouts.nftables()}",
    "nft -a": lambda p: f"{p}nft -a list ruleset\n{layouts.with_handles(layouts.nftables())}",
    "nft, one table": lambda p: f"{p}nft list table ip kube-proxy\n{layouts.nftables()}",
    "nft with spaces": lambda _: layouts.nftables().replace("\t", "    "),
    "nft before another table": lambda _: layouts.nftables() + "table ip other {\n\tchain a {\n\t\taccept\n\t}\n}\n",
}
MISSING = {
    "grep": {"web": "is not in the input", "node port": "is not in the input"},
    "one table": {"empty": "filter"},
    "nft without a decoder": dict.fromkeys(("web", "node port", "dns", "empty"), "could not decode"),
}

FLOWS = {
    "web": (POD, f"{WEB}:80/tcp"),
    "node port": (CLIENT, f"{NODE}:{NODE_PORT}/tcp"),
    "dns": (POD, f"{DNS}:53/udp"),
    "empty": (POD, f"{EMPTY}:80/tcp"),
}
HALF = Fraction(1, 2)
TRUTH = {
    "web": {("10.244.1.7", 8080, False): HALF, ("10.244.2.7", 8080, False): HALF},
    "node port": {("10.244.1.7", 8080, True): HALF, ("10.244.2.7", 8080, True): HALF},
    "dns": {("10.244.1.3", 53, False): Fraction(1)},
    "empty": {("rejected", 0, False): Fraction(1)},
}


def traced(text, flow, name="paste.txt"):
    view = view_of_files([(name, text)], "")
    source, destination = FLOWS[flow]
    known = KnownCluster(views=(view,), snapshot=Snapshot(), node_ips=(NODE,))
    return travel(known, TraceRequest(source=source, destination=destination)), view


def ends_of(path):
    """Return the ends in the form of TRUTH; "unknown" for those that the trace does not know."""
    found = {}
    for (fate, address, port, masquerade), share in path.ends().items():
        if fate in (Fate.DELIVERED, Fate.LEAVES):
            key = (address, port, masquerade)
        else:
            key = (fate.value, 0, False)
        if share:
            found[key] = found.get(key, 0) + share
    return found


def is_right_or_unknown(path, flow):
    """Return True for the right ends, and for ends that are partly unknown, with a reason, and otherwise right."""
    found, truth = ends_of(path), TRUTH[flow]
    if found.keys() == truth.keys():
        return all(abs(found[key] - truth[key]) < Fraction(1, 1000) for key in found)
    known = {key for key in found if key[0] != "unknown"}
    reasons = [leaf.end.reason for leaf in path.leaves() if leaf.end.fate is Fate.UNKNOWN]
    return len(known) < len(found) and known <= truth.keys() and all(reasons)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_iptables(shape, version):
    prompt = PROMPTS[(list(SHAPES).index(shape) + VERSIONS.index(version)) % len(PROMPTS)]
    text = SHAPES[shape](version, prompt)
    for flow in FLOWS:
        path, view = traced(text, flow)
        lacks = MISSING.get(shape, {}).get(flow)
        if lacks is None and shape != "grep":
            assert ends_of(path) == pytest.approx(TRUTH[flow], abs=1e-4), flow
        assert is_right_or_unknown(path, flow), (flow, ends_of(path))
        if lacks is not None:
            assert lacks in rendered(path), flow
        if flow == "empty" and ends_of(path) == TRUTH[flow]:
            assert [each.cause.id for each in find(path, {view.name: view}, None) if each.explains][:1] == [
                "no-endpoints"
            ]


@pytest.mark.parametrize("shape", NFT)
def test_every_shape_of_nft(shape):
    text = NFT[shape]("root@node-1:~# ")
    for flow in FLOWS:
        path, view = traced(text, flow)
        assert ends_of(path) == TRUTH[flow], flow
        if flow == "empty":
            assert [each.cause.id for each in find(path, {view.name: view}, None) if each.explains][:1] == [
                "no-endpoints"
            ]


@pytest.mark.parametrize("version", VERSIONS)
def test_two_prints_of_one_table_are_one_table(version):
    view = view_of_files([("paste.txt", SHAPES["save and listing"](version, "# "))], "")
    tables = view.rules[IPFamily.IPV4].ruleset.tables
    assert sorted(table.name for table in tables) == ["filter", "mangle", "nat"]


def test_the_parser_names_what_is_absent():
    view = view_of_files([("paste.txt", SHAPES["one table"]("1.30", "# "))], "")
    absent = {gap.table: gap.command for gap in view.rules[IPFamily.IPV4].gaps if gap.kind is GapKind.TABLE}
    assert absent.keys() == {"raw", "mangle", "filter"}
    assert absent["filter"] == "iptables-save -t filter"


# ---- cuts ------------------------------------------------------------------------------------------------------------

SAVES = {version: layouts.saved(version).splitlines() for version in VERSIONS}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_marked_cut_never_makes_the_answer_wrong(data):
    """Lines are replaced by `...`, wherever they are."""
    lines = SAVES[data.draw(st.sampled_from(VERSIONS))]
    first = data.draw(st.integers(0, len(lines) - 1))
    last = data.draw(st.integers(first + 1, min(len(lines), first + 40)))
    flow = data.draw(st.sampled_from(list(FLOWS)))
    path, _ = traced("\n".join((*lines[:first], "...", *lines[last:])), flow)
    assert is_right_or_unknown(path, flow), (first, last, flow, ends_of(path))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_text_that_begins_late_or_ends_early_never_makes_the_answer_wrong(data):
    lines = SAVES[data.draw(st.sampled_from(VERSIONS))]
    cut = data.draw(st.integers(1, len(lines) - 1))
    kept = lines[:cut] if data.draw(st.booleans()) else lines[cut:]
    flow = data.draw(st.sampled_from(list(FLOWS)))
    try:
        path, _ = traced("\n".join(kept), flow)
    except ValueError:
        return
    assert is_right_or_unknown(path, flow), (cut, flow, ends_of(path))


@pytest.mark.parametrize("version", VERSIONS)
def test_tables_and_commands_that_are_missing_never_make_the_answer_wrong(version):
    parts = [f"# iptables -t {name} -S\n{layouts.rules_of(table(version))}" for name, table in TABLES.items()]
    for number in (1, 2):
        for kept in itertools.combinations(parts, number):
            for flow in FLOWS:
                path, _ = traced("".join(kept), flow)
                assert is_right_or_unknown(path, flow), (number, flow, ends_of(path))


def is_right_or_says_so(path, flow):
    """Return True for the right ends, for unknown ones, and for ends that say what they assume about the input."""
    if is_right_or_unknown(path, flow):
        return True
    found, truth = ends_of(path), TRUTH[flow]
    wrong = {
        key for key in found if key != ("unknown", 0, False) and abs(found[key] - truth.get(key, 0)) > Fraction(1, 1000)
    }
    return all(leaf.end.supposing for leaf in path.leaves() if ends_of_leaf(leaf) in wrong)


def ends_of_leaf(leaf):
    end = leaf.end
    known = end.fate in (Fate.DELIVERED, Fate.LEAVES)
    return (end.address, end.port, end.masqueraded) if known else (end.fate.value, 0, False)


FOREIGN = "-A POSTROUTING -s"
"""Rules of another program: nothing in a text shows that one of them is missing."""


def without(lines, left_out):
    return "\n".join(line for number, line in enumerate(lines) if number not in left_out or FOREIGN in line)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_rule_that_is_missing_without_a_mark_never_makes_the_answer_wrong(version):
    lines = SAVES[version]
    wrong = []
    for number, line in enumerate(lines):
        if not line.startswith("-A"):
            continue
        for flow in FLOWS:
            path, _ = traced(without(lines, {number}), flow)
            if not is_right_or_says_so(path, flow):
                wrong.append((line, flow, ends_of(path)))
    assert not wrong


def test_nft_that_is_cut_never_makes_the_answer_wrong():
    lines = layouts.nftables().splitlines()
    for cut, flow in itertools.product(range(2, len(lines), 9), FLOWS):
        path, _ = traced("\n".join((*lines[:cut], "....", "```", "text", "table ip other {", "}")), flow)
        assert is_right_or_unknown(path, flow), (cut, flow, ends_of(path))


DUMPS = {
    **{f"save {version}": lines for version, lines in SAVES.items()},
    **{f"-S {version}": SHAPES["-S"](version, "# ").splitlines() for version in VERSIONS},
    **{f"-nL {version}": SHAPES["-nL"](version, "# ").splitlines() for version in VERSIONS},
    "-nvL 1.36": SHAPES["-nvL"]("1.36", "# ").splitlines(),
    "nft": layouts.nftables().splitlines(),
    "nft -a": layouts.with_handles(layouts.nftables()).splitlines(),
}
HEAD = re.compile(r"\*\w+$|\s*(?:table|chain|map|set|Chain) |# ip6?tables ")
"""Lines that begin a table, a chain, a map, or a command."""


@st.composite
def cuts(draw):
    """Draw a dump and the lines that it loses: single ones, a range, its end, its beginning, or whole parts."""
    name = draw(st.sampled_from(sorted(DUMPS)))
    lines = DUMPS[name]
    last = len(lines) - 1
    kind = draw(st.sampled_from(("few", "many", "range", "end", "beginning", "parts")))
    if kind in ("few", "many"):
        return name, draw(st.sets(st.integers(0, last), min_size=1, max_size=4 if kind == "few" else 40))
    if kind == "parts":
        heads = [number for number, line in enumerate(lines) if HEAD.match(line)]
        ends = dict(itertools.pairwise((*heads, len(lines))))
        gone = draw(st.sets(st.sampled_from(heads), min_size=1, max_size=3))
        return name, {number for head in gone for number in range(head, ends[head])}
    first = draw(st.integers(0, last))
    end = draw(st.integers(first, min(last, first + 30)))
    return name, set({"range": range(first, end + 1), "end": range(first, last + 1), "beginning": range(first)}[kind])


@settings(max_examples=150, deadline=None)
@given(cuts(), st.sampled_from(sorted(FLOWS)))
def test_any_lines_that_are_missing_never_make_the_answer_wrong(cut, flow):
    """Lines leave no mark, whatever they are: rules, declarations of chains, heads and ends of tables, commands, COMMIT."""
    name, left_out = cut
    try:
        path, _ = traced(without(DUMPS[name], left_out), flow)
    except ValueError:
        # Nothing that is known is left.
        return
    lost = [DUMPS[name][number] for number in sorted(left_out)]
    assert is_right_or_says_so(path, flow), (name, lost, flow, ends_of(path))


# ---- lines that a terminal has wrapped ---------------------------------------------------------------------------------


def wrapped(text, width):
    """Wrap lines as a terminal does that loses spaces at the end of a line."""
    for line in text.split("\n"):
        line = line if len(line.expandtabs()) <= width else line.expandtabs()
        yield from (line[n : n + width].rstrip() for n in range(0, max(len(line), 1), width))


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("name", ["save 1.30", "-S 1.36", "nft", "-nL 1.18", "-nL 1.36", "-nvL 1.36"])
def test_rules_that_a_terminal_has_wrapped_are_joined(name, width):
    lines = list(wrapped("\n".join(DUMPS[name]), width))
    assert max(map(len, lines)) == width
    for flow in FLOWS:
        path, view = traced("\n".join(lines), flow)
        assert ends_of(path) == pytest.approx(TRUTH[flow], abs=1e-4), flow
        assert view.rules[IPFamily.IPV4].unread == ()


def test_a_wrapped_line_of_another_length_is_named():
    lines = list(wrapped("\n".join(DUMPS["save 1.30"]), 80))
    number = next(n for n, line in enumerate(lines) if "-A KUBE-SERVICES -d" in line and len(line) == 80)
    lines[number] = lines[number][:-5]
    path, view = traced("\n".join(lines), "web")
    assert is_right_or_says_so(path, "web")
    assert any(f"line {number + 1}:" in each for each in view.rules[IPFamily.IPV4].unread)
