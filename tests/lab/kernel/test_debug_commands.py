"""The commands of tutorials are typed in labs of all modes that this machine has, and answer as the page says."""

import pytest
from tests.lab.debug_commands.walks import PAGE, page, walk_in_lab

SAYS = "python scripts/debug_commands_page.py writes it"


@pytest.mark.kernel
@pytest.mark.parametrize("mode", ["iptables", "nftables", "userspace"])
def test_commands_answer_as_the_page_says(mode):
    """Mode ipvs needs the second kernel, tests/uml/test_debug_commands.py."""
    walk_in_lab(mode)


def test_the_page_is_made_of_these_commands():
    assert PAGE.read_text() == page(), SAYS
