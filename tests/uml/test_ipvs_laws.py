"""Laws of the ipvs Target on a kernel: what is read back after an apply is what was meant, from any state to any other."""

import os

import pytest
from hypothesis import Phase, given, settings
from tests.proxy.kernel.test_backend_kernel_laws import TURNS, plans

from narthex.linux.namespaces import create_namespace, delete_namespace
from narthex.model.net import IPFamily
from narthex.proxy.backends.ipvs.backend import IpvsBackend
from narthex.proxy.kernel.ipvs import IpvsTarget
from narthex.testing import strategies as some
from narthex.testing.build import CONFIG

DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without shrinking: an example takes seconds on this kernel."""


@pytest.fixture
def space(request):
    name = f"nx-law-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"
    create_namespace(name)
    yield name
    delete_namespace(name)


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
def test_read_after_apply_is_what_was_meant(family, space):
    backend, target = IpvsBackend(), IpvsTarget(family, space)

    @settings(max_examples=5, phases=DRAWN)
    @given(some.configs, TURNS)
    def law(config, turns):
        target.clean()
        assert target.read() is None
        have = None
        for plan in plans(config, family, turns):
            want, changes = backend.advance(have, plan)
            target.apply(changes)
            assert not backend.diff(target.read(), want)
            have = want

    law()


@pytest.mark.parametrize("family", list(IPFamily), ids=lambda family: family.label)
def test_from_any_state_to_any_other_by_what_is_read(family, space):
    """A new process knows nothing of the old one's plan: it reads the kernel and writes the difference."""
    backend = IpvsBackend()

    @settings(max_examples=4, phases=DRAWN)
    @given(TURNS, TURNS)
    def law(before, after):
        IpvsTarget(family, space).clean()
        for turns in (before, after):
            *_, plan = plans(CONFIG, family, turns)
            want = backend.render(plan)
            target = IpvsTarget(family, space)
            target.apply(backend.diff(target.read(), want))
            assert not backend.diff(target.read(), want)

    law()
