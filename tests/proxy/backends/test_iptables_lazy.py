"""Rules that write themselves without typed values write what the typed ones write, and are equal to them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narthex.model.net import IPFamily, Protocol
from narthex.netfilter.ast import Compare, Field, Jump, Rule, Unprintable
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.netfilter.xtables.print import chain_lines
from narthex.proxy.backends.iptables.chains import DrawRules, EndpointRules
from narthex.proxy.plan.ir import Endpoint

protocols = st.sampled_from([Protocol.TCP, Protocol.UDP, Protocol.SCTP])
comments = st.one_of(st.just(""), st.sampled_from(["shop/web:http", 'say "hi"', "a -> 10.0.0.1:80", "x\\y", "it's"]))
chains = st.from_regex(r"KUBE-SEP-[A-Z2-7]{16}", fullmatch=True)
firsts = st.lists(
    st.builds(
        lambda address, comment: Rule((Compare(Field.SADDR, (address,)), Jump("KUBE-MARK-MASQ")), comment),
        st.ip_addresses(v=4).map(str),
        comments,
    ),
    max_size=2,
).map(tuple)


@st.composite
def endpoint_rules(draw, family):
    end = Endpoint(str(draw(st.ip_addresses(v=family.value))), draw(st.integers(1, 65535)))
    return EndpointRules(end, draw(protocols), draw(comments))


@st.composite
def draw_rules(draw):
    ways = tuple(draw(st.lists(chains, min_size=1, max_size=12)))
    said = draw(st.one_of(st.just(()), st.lists(comments, min_size=len(ways), max_size=len(ways)).map(tuple)))
    return DrawRules(draw(firsts), ways, said)


some = st.one_of(
    st.tuples(st.just(IPFamily.IPV4), endpoint_rules(IPFamily.IPV4)),
    st.tuples(st.just(IPFamily.IPV6), endpoint_rules(IPFamily.IPV6)),
    st.tuples(st.just(IPFamily.IPV4), draw_rules()),
)


@given(some)
def test_the_text_is_that_of_the_typed_rules(made):
    family, rules = made
    assert list(chain_lines("KUBE-X", rules, family)) == list(chain_lines("KUBE-X", rules.build(), family))


@given(some)
def test_the_text_is_read_as_the_typed_rules(made):
    family, rules = made
    lines = "\n".join(chain_lines("KUBE-X", rules, family))
    targets = {"KUBE-MARK-MASQ", *(rule.expressions[-1].chain for rule in rules if type(rule.expressions[-1]) is Jump)}
    declared = "\n".join(f":{chain} - [0:0]" for chain in ("KUBE-X", *sorted(targets)))
    (table,) = parse_save_text(f"*nat\n{declared}\n{lines}\nCOMMIT\n", family).tables
    assert table.chains["KUBE-X"].rules == rules


@given(some, some)
def test_equal_when_the_rules_are(one, other):
    (_, one), (_, other) = one, other
    same = one.build() == other.build()
    assert (one == other) is same
    assert (one == other.build()) is same
    assert (one.build() == other) is same
    assert one == one.build()
    assert len(one) == len(one.build())
    assert list(one) == list(one.build())


@pytest.mark.parametrize("address", ["10.0.0.1 -j ACCEPT", "10.0.0.0/8", "10.0.0.1\n-A INPUT", ""])
def test_what_is_no_address_is_not_written(address):
    with pytest.raises(Unprintable):
        list(chain_lines("KUBE-X", EndpointRules(Endpoint(address, 80), Protocol.TCP, ""), IPFamily.IPV4))


@pytest.mark.parametrize("way", ["KUBE-A\nKUBE-B", "-j", "", "a b", "x" * 29])
def test_what_is_no_chain_is_not_written(way):
    with pytest.raises(Unprintable):
        list(chain_lines("KUBE-X", DrawRules((), ("KUBE-SEP-A", way)), IPFamily.IPV4))
