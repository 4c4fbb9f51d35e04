"""Rules that are followed change by change: what a change touches, and what some packets can meet."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model import Host, IPFamily
from narthex.netfilter import ast
from narthex.netfilter.edit import TableEdit, UnfitEdit
from narthex.netfilter.sets.long_chain import LongChain
from narthex.netfilter.sets.numbered import NumberedItems
from narthex.netfilter.sets.rule_difference import rule_difference
from narthex.netfilter.sets.space import PacketSpace
from narthex.netfilter.sets.touched import RuleReach
from narthex.netfilter.sets.tracked import TrackedTable
from narthex.netfilter.sets.values import ValueSet

V4 = IPFamily.IPV4
BASE = ast.Hook(type="nat", hook="prerouting", priority=-100)


def to(number, chain="x"):
    address = ast.Compare(ast.Field.DADDR, (f"10.0.{number >> 8}.{number & 255}",))
    return ast.Rule((address, ast.Jump(chain)))


@given(st.lists(st.integers(0, 30), unique=True), st.lists(st.integers(0, 30), unique=True))
def test_the_difference_of_two_versions_leads_from_one_to_the_other(old, new):
    """Rules are new objects at random, as those that are rendered again are."""
    rules = {number: to(number) for number in range(31)}
    have = [rules[number] for number in old]
    want = [to(number) if number % 3 else rules[number] for number in new]
    found = rule_difference(have, want)
    kept = [number for number in old if number in new]
    if kept != [number for number in new if number in old]:
        assert found is None
        return
    assert [rule for rule in have if rule not in found.removed] == [rule for rule in want if rule not in found.added]
    assert all(one == other and one is not other for one, other in found.swapped)


@given(st.lists(st.tuples(st.integers(0, 40), st.booleans())), st.integers(0, 40), st.integers(0, 40))
def test_numbered_items_are_found_by_intervals(changes, one, other):
    items, plain = NumberedItems(), {}
    wide = ValueSet(((min(one, other), max(one, other)),))
    for number, put in changes:
        items = items.with_item(number, str(number) if put else None)
        plain = {**plain, number: str(number)} if put else {key: item for key, item in plain.items() if key != number}
        assert list(items.chosen(wide)) == [plain[key] for key in sorted(plain) if key in wide]
    assert len(items) == len(plain)


def test_a_long_chain_is_followed_as_if_it_were_read_anew():
    rng = random.Random(4)
    rules = [*map(to, range(200)), ast.Rule((ast.IsLocal(ast.Field.DADDR), ast.Jump("nodes")))]
    index = LongChain.of(rules)
    for step in range(30):
        gone = rng.randrange(len(rules) - 1)
        fresh = [
            *rules[:gone],
            *rules[gone + 1 : -1],
            to(1000 + step, f"to-{step % 3}"),
            ast.Rule(rules[-1].expressions),
        ]
        index, rules = index.after(tuple(fresh), rule_difference(rules, fresh)), fresh
        anew = LongChain.of(rules)
        every = ValueSet(((0, (1 << 32) - 1),))
        assert index.some(every, every) == anew.some(every, every) == tuple(rules)
        for name in ("x", "nodes", "to-0", "to-1", "to-2"):
            assert set(map(id, index.calling(name))) == set(map(id, anew.calling(name)))


def table():
    services = ast.Set(
        name="services", key=(ast.Field.DADDR,), data="verdict", elements={("10.0.0.1",): ast.Goto("one")}
    )
    chains = {"base": (ast.Rule((ast.VerdictMap(services.key, "services"),)),), "one": (ast.Rule((ast.DropPacket(),)),)}
    edit = TableEdit(
        family=V4, table="t", replace=True, chains=chains, hooks={"base": BASE}, sets=(services,),
        filled=frozenset({"services"}),
    )  # fmt: skip
    return TrackedTable(V4, "t").after(edit)[0]


def touched(before, **fields):
    """Return the destinations that an edit touches, None for all."""
    made, what = before.after(TableEdit(family=V4, table="t", **fields))
    space = PacketSpace(V4, Host())
    headers = RuleReach({"t": made}, space).touched({"t": what})
    return None if headers is None else sorted(space.address_text(each[0].first) for each in headers)


def test_what_an_edit_touches():
    one, two, accept = ("10.0.0.1",), ("10.0.0.2",), ast.Rule((ast.Accept(),))
    assert touched(table(), chains={"one": (accept,)}) == ["10.0.0.1"]
    assert touched(table(), additions={"services": {two: ast.Goto("one")}}) == ["10.0.0.2"]
    moved = {"deletions": {"services": {one: ast.Goto("one")}}, "additions": {"services": {one: ast.DropPacket()}}}
    assert touched(table(), **moved) == ["10.0.0.1"]
    assert touched(table(), chains={"base": (accept,)}) is None
    assert touched(table(), chains={"new": (accept,)}) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"deletions": {"services": {("10.0.0.9",): ast.Goto("one")}}},
        {"additions": {"services": {("10.0.0.1",): ast.Goto("two")}}},
        {"additions": {"others": {("10.0.0.1",): None}}},
        {"removed_chains": ("two",)},
        {"removed_sets": ("others",)},
    ],
)
def test_an_edit_that_a_kernel_would_refuse_does_not_fit(fields):
    with pytest.raises(UnfitEdit):
        table().after(TableEdit(family=V4, table="t", **fields))


def test_the_changes_between_two_versions_lead_from_one_to_the_other():
    before = table()
    after = before.after(
        TableEdit(
            family=V4, table="t", chains={"two": (ast.Rule((ast.Accept(),)),)},
            additions={"services": {("10.0.0.2",): ast.Goto("two")}},
        )
    )[0]  # fmt: skip
    for have, want in ((before, after), (after, before)):
        edit = have.edit_to(want)
        assert have.after(edit)[0].table() == want.table()
        assert want.holds(edit) and not have.holds(edit)
