"""Generated clusters in mode ipvs: the kernel does to every packet what the plan says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from narthex.testing import strategies as some
from narthex.testing.crowds import crowds
from netns.test_kernel_fuzz import configs, demand, drawn, last_of_each, scenario

MODE = "ipvs"


@settings(max_examples=30, phases=drawn)
@given(configs, some.families, st.lists(some.objects, min_size=3, max_size=12), st.data())
def test_small_clusters_with_anything_in_them(config, family, objects, data):
    packets = data.draw(st.lists(some.packets(family), min_size=4, max_size=8))
    demand(scenario(config, last_of_each(objects), packets, MODE), MODE)


@settings(max_examples=12, phases=drawn)
@given(configs, st.data())
def test_crowds_of_services(config, data):
    family = data.draw(some.families)
    crowd = data.draw(crowds(family, least=10, most=120, packets=10))
    demand(scenario(config, crowd.objects, crowd.packets, MODE), MODE)
