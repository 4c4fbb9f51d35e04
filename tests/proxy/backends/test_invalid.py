"""What each mode does about packets that conntrack calls invalid (rows 19.7, 30.9), and when it does nothing."""

import pytest

from narthex.model.net import FAMILIES
from narthex.proxy.backends import BACKENDS
from narthex.testing.build import plan


def lines(mode, family, **config):
    backend = BACKENDS[mode]
    return [line.strip() for line in backend.text(backend.render(plan(family=family, **config))).splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_iptables_mode_drops_them_before_anything_else_in_forward(family):
    chain = [line for line in lines("iptables", family) if line.startswith("-A KUBE-FORWARD")]
    assert chain[0] == "-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP"


@pytest.mark.parametrize("family", FAMILIES)
def test_nftables_mode_drops_only_the_resets_that_answer_them(family):
    text = lines("nftables", family)
    assert [line for line in text if "invalid" in line] == ["ct state invalid tcp flags rst drop"] * 2
    for chain in ("filter-forward", "filter-output"):
        assert text[text.index(f"chain {chain} {{") + 2] == "ct state invalid tcp flags rst drop"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", BACKENDS)
def test_where_the_kernel_is_liberal_there_is_nothing_to_do(mode, family):
    with_rule, without = lines(mode, family), lines(mode, family, drop_invalid=False)
    assert "invalid" not in " ".join(without).lower()
    assert [line for line in with_rule if "invalid" not in line.lower()] == without
