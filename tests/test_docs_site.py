"""The site: it builds in strict mode, loads nothing from elsewhere, and has all pages, the Python API, and pictures."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import narthex

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, str(ROOT / "scripts" / "docs_site.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page loads, where its links lead, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.anchors = set(), set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        if tag in ("script", "img", "iframe", "source"):
            self.loads.add(found.get("src") or "")
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loads.add(found["href"])
        if tag == "a":
            self.links.add(found.get("href") or "")


@pytest.fixture(scope="module")
def pages(site):
    # The playground has a page of its own making, with tests of its own.
    return {path: Page(path) for path in site.rglob("*.html") if "playground/build" not in str(path)}


def test_each_document_is_a_page(site):
    names = {"README.md": "index.html", "index.md": "index.html"}
    for folder in ("tutorial", "howto", "explanation", "reference", "adr", "releases"):
        for page in (ROOT / "docs" / folder).rglob("*.md"):
            made = page.with_name(names.get(page.name, f"{page.stem}.html"))
            assert (site / made.relative_to(ROOT)).exists(), page


def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert len(pages) > 100
    foreign = {each for page in pages.values() for each in page.loads if urlsplit(each).netloc}
    assert foreign == set()
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\((?!data:|['\"]?data:)['\"]?(https?:)?//", style.read_text()), style


def test_links_lead_to_pages_and_headings(site, pages):
    dead = []
    for path, page in pages.items():
        for link in page.links | page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            if not target.exists() or (known and parts.fragment and unquote(parts.fragment) not in known.anchors):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_the_api_page_is_made_from_the_docstrings(site):
    text = (site / "docs" / "reference" / "python.html").read_text()
    for name in narthex.__all__:
        if not name.startswith("_"):
            assert f'id="narthex.api.{name}"' in text
            assert getattr(narthex, name).__doc__.splitlines()[0].split("`")[0][:30] in re.sub(r"<[^>]+>", "", text)


def test_the_pictures_are_drawn_by_the_program(site, pages):
    page = site / "docs" / "pictures" / "index.html"
    assert len(pages[page].loads & {"node-port.svg", "bug-report.svg", "cluster-ip.svg"}) == 3
    for picture in page.parent.glob("*.svg"):
        assert "<svg" in picture.read_text()[:200]


def test_the_playground_is_part_of_the_site_if_it_was_built(site):
    built = (ROOT / "playground" / "build" / "site").is_dir()
    assert (site / "playground" / "build" / "site" / "index.html").exists() == built
    assert ("playground/build/site/index.html" in (site / "index.html").read_text()) == built
