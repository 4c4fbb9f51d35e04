"""Whatever a cluster is, the issue text of a question gives the same answer as the bundle that it is made of."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.trace.issue.drawn_bundles import bundle, objects

from narthex.model import IPFamily, Store, Synced, join_port
from narthex.testing import strategies as drawn
from narthex.testing.build import NODE, node
from narthex.trace.issue.text import IssueQuestion
from narthex.trace.program.issue import make_issue
from narthex.trace.program.places import TraceError

MODES = ("nftables", "iptables", "ipvs", "userspace")


def snapshot_of(events):
    store = Store()
    store.apply(drawn.Upsert(node()))
    for event in events:
        store.apply(event)
    return store.apply(Synced())


@pytest.mark.parametrize("key", [None, b"a key"], ids=["as it is", "anonymized"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_the_text_gives_the_same_answer(mode, key, data) -> None:
    snapshot = snapshot_of(data.draw(drawn.changes) + data.draw(drawn.changes))
    config = data.draw(drawn.configs)
    packet = data.draw(drawn.packets(data.draw(st.sampled_from(list(IPFamily)))))
    taken = bundle(snapshot, config, mode, data.draw(st.sampled_from([{}, objects(snapshot)])))
    question = IssueQuestion(
        source=packet.source,
        destination=f"{join_port(packet.destination, packet.port)}/{packet.protocol.lower}",
        node=NODE,
        iif=packet.iif,
    )
    try:
        made = make_issue(question, [taken], key)
    except TraceError:
        return
    assert made.whole == ()
    assert len(made.text) < sum(map(len, taken.parts.values()))
