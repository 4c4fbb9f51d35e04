"""From one set of nftables rules to the next: no more is written than what changed."""

import msgspec
import pytest
from tests.proxy.backends.nft_plans import INTERNAL, after, everything, frontend, plan, pool, port_name, service

from narthex.model.net import IPFamily
from narthex.netfilter.ast import DropPacket
from narthex.netfilter.nft.print import chain_text
from narthex.proxy.backends.nftables.backend import NftablesBackend
from narthex.proxy.plan.ir import Lineage

BACKEND = NftablesBackend()


def step(first, *changed, removed=()):
    """Render two plans, one from the other; the changes, checked against a comparison of all."""
    have = BACKEND.render(first)
    second = after(first, *changed, removed=removed)
    want, changes = BACKEND.advance(have, second)
    assert BACKEND.patch(have, changes) == want
    whole = BACKEND.diff(have, BACKEND.patch(have, changes))
    assert whole.deletions == changes.deletions
    assert whole.additions == changes.additions
    return changes


def test_an_endpoint_that_leaves_takes_its_clients_along():
    first = plan(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=60))
    changes = step(first, service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10), affinity=60))
    (gone,) = changes.removed_sets
    assert gone.endswith("-10.64.1.11/8080")
    assert changes.element_count() == 0
    rewritten = "\n".join(chain_text(chain, IPFamily.IPV4) for chain in changes.chains)
    assert gone not in rewritten
    script = changes.last_script()
    assert script.index("flush chain") < script.index("delete chain") < script.index("delete set")


def test_a_new_timeout_changes_the_sets_in_place():
    first = plan(service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=60))
    changes = step(first, service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11), affinity=90))
    assert not changes.replace
    assert {one.timeout for one in changes.sets} == {90}
    assert (changes.chains, changes.removed_sets, changes.element_count()) == ((), (), 0)


def test_affinity_on_and_off():
    plain = service("s", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(10, 11))
    sticky = msgspec.structs.replace(plain, affinity_seconds=60)
    on = step(plan(plain), sticky)
    assert len(on.additions["services"]) == 1
    assert len(on.deletions["endpoints"]) == 2
    off = step(plan(sticky), plain)
    assert len(off.removed_sets) == 2
    assert len(off.additions["endpoints"]) == 2


def web(*numbers, local=(), count_of_frontends=1):
    frontends = [frontend(f"10.96.0.{n + 1}", 80, INTERNAL) for n in range(count_of_frontends)]
    return service("web", *frontends, cluster=pool(*numbers, local=local))


def sizes(changes):
    return (
        {name: len(pairs) for name, pairs in changes.deletions.items()},
        {name: len(pairs) for name, pairs in changes.additions.items()},
    )


def test_one_more_endpoint_is_one_element_and_another_count():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 11, 12, 13))
    assert sizes(changes) == ({"services-of-3": 1}, {"services-of-4": 1, "endpoints": 1})


def test_the_last_endpoint_less_is_one_element_and_another_count():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 11))
    assert sizes(changes) == ({"services-of-3": 1, "endpoints": 1}, {"services-of-2": 1})


def test_an_endpoint_less_moves_the_last_into_its_place():
    changes = step(plan(web(10, 11, 12), *others()), web(11, 12))
    assert sizes(changes) == ({"services-of-3": 1, "endpoints": 2}, {"services-of-2": 1, "endpoints": 1})


def test_an_endpoint_for_another_is_one_place():
    changes = step(plan(web(10, 11, 12), *others()), web(10, 12, 13))
    assert sizes(changes) == ({"endpoints": 1}, {"endpoints": 1})


def test_a_local_endpoint_more_is_a_hairpin_too():
    changes = step(plan(web(10), *others()), web(10, 11, local=(11,)))
    assert sizes(changes) == ({"services-of-1": 1}, {"services-of-2": 1, "endpoints": 1, "hairpin": 1})


def test_every_frontend_has_its_elements():
    changes = step(plan(web(10, 11, count_of_frontends=3)), web(10, 11, 12, count_of_frontends=3))
    assert sizes(changes) == ({"services-of-2": 3}, {"services-of-3": 3, "endpoints": 3})


def test_nothing_changed_is_nothing_to_do():
    first = plan(everything(), *others())
    rules = BACKEND.render(first)
    again, changes = BACKEND.advance(rules, after(first))
    assert not changes
    assert not BACKEND.diff(rules, BACKEND.render(first))
    assert again == rules


def others():
    """Services beside the one that changes, with all counts that the tests need."""
    return [
        service(f"o{n}", frontend(f"10.96.9.{n}", 80, INTERNAL), cluster=pool(*range(100, 100 + n)))
        for n in range(1, 6)
    ]


def test_elements_that_several_need_stay_until_the_last_goes():
    address = "10.96.0.1"
    http = service("web", frontend(address, 80, INTERNAL), cluster=pool(10, local=(10,)))
    https = service("web", frontend(address, 443, INTERNAL), cluster=pool(10, local=(10,)), port="https")
    both = plan(http, https, *others())
    first = step(both, removed=(https.name,))
    assert "cluster-ips" not in first.deletions
    assert "hairpin" not in first.deletions
    second = step(plan(http, *others()), removed=(http.name,))
    assert set(second.deletions["cluster-ips"]) == {(address,)}
    assert set(second.deletions["hairpin"]) == {("10.64.1.10", "10.64.1.10")}


def test_a_match_can_go_from_one_service_to_another_at_once():
    one, other = web(10), service("other", cluster=pool(11))
    first = plan(one, other)
    changes = step(
        first, service("web", cluster=pool(10)), service("other", frontend("10.96.0.1", 80, INTERNAL), cluster=pool(11))
    )
    assert sizes(changes) == ({"endpoints": 1}, {"endpoints": 1})


@pytest.mark.row("21.13")
def test_a_change_does_not_look_at_other_services():
    class Unwalkable:
        """Services that may be looked up, but not gone through."""

        def __init__(self, held):
            self.held = held
            self.asked = []

        def get(self, name, default=None):
            self.asked.append(name)
            return self.held.get(name, default)

        def __getattr__(self, name):
            raise AssertionError(f"all Services were gone through ({name})")

        def __iter__(self):
            raise AssertionError("all Services were gone through")

        __len__ = __contains__ = keys = values = items = __iter__

    first = plan(web(10), *others())
    have = BACKEND.render(first)
    second = after(first, web(10, 11))
    watched = Unwalkable(second.services)
    changes = BACKEND.advance(have, msgspec.structs.replace(second, services=watched))[1]
    assert watched.asked == [port_name("web")]
    assert changes.element_count() == 3


@pytest.mark.row("21.13", "21.16")
def test_without_lineage_only_what_differs_is_written():
    kept = others()
    have = BACKEND.render(plan(web(10, 11, 12), everything(), *kept))
    changed = plan(web(10, 11, 12, 13), *kept)
    assert changed.lineage.parent == 0
    want, changes = BACKEND.advance(have, changed)
    assert BACKEND.patch(have, changes) == want
    assert len(changes.additions["endpoints"]) == 1


def test_slots_stay_when_a_setting_changes():
    first = plan(web(10, 11, 12))
    have = BACKEND.render(first)
    moved, _ = BACKEND.advance(have, after(first, web(11, 12)))
    other = msgspec.structs.replace(after(first, web(11, 12)), service_cidrs=("10.97.0.0/16",))
    changes = BACKEND.advance(moved, other)[1]
    assert changes.element_count() == 0
    assert [one.name for one in changes.sets] == ["service-cidrs"]
    assert "flush set ip narthex service-cidrs\nadd element ip narthex service-cidrs { 10.97.0.0/16 }" in (
        changes.first_script()
    )


def test_a_step_counts_only_from_its_own_origin():
    first = plan(web(10), *others())
    one = BACKEND.render(first)
    two, _ = BACKEND.advance(one, after(first, web(10, 11)))
    stranger = BACKEND.render(plan(web(10, 11), *others()))
    assert not BACKEND.diff(stranger, two)
    assert BACKEND.patch(stranger, BACKEND.diff(stranger, one)) == one


def test_lineage_of_another_plan_is_no_short_cut():
    have = BACKEND.render(plan(web(10)))
    foreign = Lineage(Lineage(), frozenset())
    want, changes = BACKEND.advance(have, msgspec.structs.replace(plan(web(10, 11)), lineage=foreign))
    assert len(want.table().sets["endpoints"].elements) == 2
    assert BACKEND.patch(have, changes) == want


def test_replacement_hooks_in_last():
    changes = BACKEND.diff(None, BACKEND.render(plan(everything())))
    assert changes.replace
    assert changes.first_script().startswith("table ip narthex\ndelete table ip narthex\ntable ip narthex")
    assert "hook" not in changes.first_script()
    assert changes.last_script().count(" hook ") == 8


def test_a_hook_that_moved_replaces_all():
    want = BACKEND.render(plan(everything()))
    chains = dict(want.table().chains)
    base = chains["filter-input"]
    chains["filter-input"] = msgspec.structs.replace(base, hook=msgspec.structs.replace(base.hook, priority=7))
    from narthex.proxy.backends.nftables.backend import from_table

    have = from_table(msgspec.structs.replace(want.table(), chains=chains))
    changes = BACKEND.diff(have, want)
    assert changes.replace
    assert BACKEND.patch(have, changes) == want


def test_what_somebody_broke_is_mended():
    from narthex.proxy.backends.nftables.backend import from_table

    want = BACKEND.render(plan(everything()))
    whole = want.table()
    chains = {name: chain for name, chain in whole.chains.items() if name not in ("nat-output", "send-c")}
    chains["stranger"] = msgspec.structs.replace(whole.chains["reject-chain"], name="stranger")
    services = msgspec.structs.replace(whole.sets["services"], elements={("1.2.3.4", "tcp", 1): DropPacket()})
    have = from_table(msgspec.structs.replace(whole, chains=chains, sets={**whole.sets, "services": services}))
    changes = BACKEND.diff(have, want)
    assert {chain.name for chain in changes.chains} == {"send-c"}
    assert {chain.name for chain in changes.late_chains} == {"nat-output"}
    assert changes.removed_chains == ("stranger",)
    assert set(changes.deletions) == {"services"}
    assert BACKEND.patch(have, changes) == want
