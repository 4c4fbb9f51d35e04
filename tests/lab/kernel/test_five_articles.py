"""The tutorial about five articles: its commands are typed in labs of all modes that this machine has."""

import pytest
from tests.lab.debug_commands.articles import ALL, EN, MODES, ZH, articles, page, walk_in_lab


@pytest.mark.kernel
@pytest.mark.parametrize("mode", ["iptables", "nftables", "userspace"])
def test_commands_print_what_the_tutorial_says(mode):
    """Mode ipvs needs the second kernel, tests/uml/test_debug_commands.py."""
    walk_in_lab(mode)


@pytest.mark.parametrize("language", [EN, ZH], ids=["en", "zh"])
def test_the_pages_are_made_of_these_commands(language):
    assert language.page.read_text() == page(language), "run `python scripts/five_articles_page.py`"


def test_each_command_has_an_answer_and_a_reason_in_both_languages():
    for article in articles():
        for step in article.steps:
            assert (set(step.now) <= {*MODES, ALL} and step.answers("iptables")) or step.answers("ipvs"), step.command
            assert bool(step.why.en) == bool(step.why.zh), step.command
            for mode in MODES:
                assert all(each.shows or each.lacks for each in step.answers(mode)), step.command
