"""Paths in notebooks: a picture, and the page for a ticket in a frame without permissions."""

from html.parser import HTMLParser

from tests.trace.test_render import HOSTILE, finding, journey

import narthex
from narthex.trace.render.drawing import draw
from narthex.trace.render.html import frame, page
from narthex.trace.render.svg import svg


class Elements(HTMLParser):
    """The elements of a text, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))


def test_a_path_is_shown_as_the_picture_and_the_page():
    path = journey()
    assert path._repr_svg_() == svg(draw(path))
    [(tag, attributes)] = Elements(path._repr_html_()).seen
    assert (tag, attributes["sandbox"], attributes["srcdoc"]) == ("iframe", "", page(path))


def test_an_explanation_shows_its_causes():
    path, causes = journey(), (finding("the reason"),)
    explanation = narthex.Explanation(path=path, causes=causes)
    assert explanation._repr_svg_() == svg(draw(path), causes)
    assert explanation._repr_html_() == frame(path, causes)
    assert "the reason" in explanation._repr_html_()


def test_hostile_names_stay_inside_the_frame():
    [(tag, _)] = Elements(frame(journey(HOSTILE), [finding(HOSTILE)])).seen
    assert tag == "iframe"
