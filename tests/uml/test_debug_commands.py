"""The commands of tutorials about mode ipvs, in a lab on the second kernel."""

from tests.lab.debug_commands import articles
from tests.lab.debug_commands.walks import walk_in_lab


def test_commands_answer_as_the_page_says():
    walk_in_lab("ipvs")


def test_commands_print_what_the_tutorial_about_five_articles_says():
    articles.walk_in_lab("ipvs")
