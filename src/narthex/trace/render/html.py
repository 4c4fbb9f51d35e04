"""A path as one self-contained HTML page: no scripts, no fonts, no external pictures.

The result and its causes come first, then the picture, then every step. The page is also well-formed XML. All text goes
through an XML tree, so that untrusted text can't become markup.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from narthex.model import visible
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import PacketPath
from narthex.trace.render import svg as render_svg
from narthex.trace.render.drawing import draw
from narthex.trace.render.outline import Group, Items, Row, heading, outline
from narthex.trace.render.styled import Style
from narthex.trace.render.verdict import SIGNS, WELL, judge, share_text

MOST_ROWS = 600
"""Rows of the outline; what follows is only counted."""
_LONGEST = 600
_MOST_REASONS = 6

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", Roboto, Arial, sans-serif; margin: 0 auto; max-width: 1080px;
  padding: 1.5rem 1rem 3rem; color: #1f2328; background: #ffffff; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; overflow-wrap: break-word; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
code, pre { font: 12.5px/1.45 ui-monospace, SFMono-Regular, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; overflow-wrap: break-word; margin: .4rem 0; }
.result { display: inline-block; border: 1px solid; border-radius: 1rem; padding: .05rem .8rem; font-weight: 600; }
.result.good { color: #116329; background: #dafbe1; } .result.bad { color: #a40e26; background: #ffebe9; }
.result.doubt { color: #7d4e00; background: #fff8c5; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: .8rem 0; }
dt { color: #59636e; } dd { margin: 0; overflow-wrap: break-word; min-width: 0; }
section.cause { border: 1px solid #cf222e; border-radius: 8px; padding: .6rem 1rem; margin: .8rem 0; background: #ffebe9; }
section.cause.other { border-color: #9a6700; background: #fff8c5; }
section.cause h2, section.cause h3 { margin: .2rem 0 .4rem; font-size: 1.05rem; }
section.cause p { margin: .3rem 0; } .dim { color: #59636e; }
.picture { overflow-x: auto; } .picture svg { max-width: 100%; height: auto; }
.outline { overflow-wrap: break-word; }
.row { display: grid; grid-template-columns: 7rem minmax(0, 1fr); gap: 0 .8rem; padding: .15rem 0; }
.row.place { display: block; font-weight: 600; margin-top: .4rem; }
.row.end { grid-template-columns: 1.2rem minmax(0, 1fr); font-weight: 600; }
.row:not(.end) .stage, .note { color: #59636e; } .note { font-size: .87rem; font-weight: 400; }
.row.end.good { color: #116329; } .row.end.bad { color: #a40e26; } .row.doubt, .note.doubt { color: #7d4e00; }
.below { margin-left: 1.2rem; }
.group { border-left: 2px solid #d1d9e0; padding-left: .8rem; margin: .4rem 0 .4rem .2rem; } .group.bad { border-left-color: #cf222e; }
.head { display: grid; grid-template-columns: 3.6rem minmax(0, 1fr); font-weight: 600; } .head code { margin-right: .8rem; }
@media (max-width: 720px) {
.picture { display: none; } .row { grid-template-columns: minmax(0, 1fr); } dl { grid-template-columns: minmax(0, 1fr); }
dd { margin-bottom: .3rem; }
}
@media (prefers-color-scheme: dark) {
body { color: #e6edf3; background: #0d1117; } .dim, dt, .row:not(.end) .stage, .note { color: #9198a1; } .group { border-color: #3d444d; }
.row.end.good { color: #56d364; } .row.end.bad { color: #ff9492; } .row.doubt, .note.doubt { color: #e3b341; }
.result.good { color: #56d364; background: #12261e; } .result.bad { color: #ff9492; background: #301418; }
.result.doubt { color: #e3b341; background: #2b2210; }
section.cause { border-color: #f85149; background: #301418; } section.cause.other { border-color: #d29922; background: #2b2210; }
}
@media print { body { max-width: none; padding: 0; color: #000; background: #fff; } }
"""


def page(path: PacketPath, findings: Sequence[CauseFinding] = ()) -> str:
    """Return the page, ending with a newline."""
    drawing = draw(path)
    html = ET.Element("html", {"xmlns": "http://www.w3.org/1999/xhtml", "lang": "en"})
    head = ET.SubElement(html, "head")
    ET.SubElement(head, "title").text = f"{drawing.title}: {drawing.result}"
    ET.SubElement(head, "style").text = STYLE
    main = ET.SubElement(ET.SubElement(html, "body"), "main")
    _summary(main, path, drawing.title, findings)
    for number, finding in enumerate(findings):
        _cause(main, finding, "Why not" if not number and finding.explains else "Also")
    facts = ET.SubElement(main, "dl")
    for name, value in drawing.lines:
        _put(facts, "dt", name)
        _put(facts, "dd", value)
    _put(main, "h2", "The path", "picture")
    figure = ET.SubElement(main, "figure", {"class": "picture", "style": "margin: 0"})
    figure.append(render_svg.element(drawing, findings, head=False))
    title, rules = heading(path)
    _put(main, "h2", "Step by step")
    _put(main, "p", f"{title} {rules}".strip(), "dim")
    rest = _Outline().items(ET.SubElement(main, "div", {"class": "outline"}), outline(path, every=True))
    if rest:
        _put(main, "p", f"{rest} more rows are not listed.")
    text = ET.tostring(html, encoding="unicode", short_empty_elements=False)
    # The one element that HTML has no end tag for, and the tree would give it one.
    text = text.replace(
        "<head>",
        '<head>\n<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width, initial-scale=1"/>\n',
        1,
    )
    return f"<!DOCTYPE html>\n{text}\n"


def frame(path: PacketPath, findings: Sequence[CauseFinding] = ()) -> str:
    """Return the page as an element for a notebook's cell, whose style the page does not touch, without any permissions."""
    element = ET.Element("iframe", {"sandbox": "", "srcdoc": page(path, findings), "title": draw(path).title})
    element.set("style", "width: 100%; height: 40rem; border: 1px solid #8885; border-radius: 6px")
    return ET.tostring(element, encoding="unicode", short_empty_elements=False)


def _put(into: ET.Element, tag: str, text: str, kind: str = "") -> ET.Element:
    made = ET.SubElement(into, tag)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    made.text = "\n".join(visible(line) for line in text.split("\n"))
    if kind:
        made.set("class", kind)
    return made


def _with_code(into: ET.Element, text: str) -> None:
    """Write a paragraph in which commands are between backticks."""
    words = text.split("`")
    paragraph = _put(into, "p", words[0])
    for command, rest in zip(words[1::2], [*words[2::2], ""], strict=False):
        _put(paragraph, "code", command).tail = visible(rest)


def _summary(main: ET.Element, path: PacketPath, title: str, findings: Sequence[CauseFinding]) -> None:
    header = ET.SubElement(main, "header")
    _put(header, "h1", title)
    verdict = judge(path, findings)
    kind = "good" if verdict.style in WELL else verdict.style.value
    _put(header, "span", f"{SIGNS[verdict.style]} {verdict.word}", f"result {kind}").set("role", "status")
    several = len(verdict.reasons) > 1
    for reason in verdict.reasons[:_MOST_REASONS]:
        _put(header, "p", f"{share_text(reason.share)}: {reason.text}" if several else reason.text)
    for doubt in (*verdict.possible, *(f"assumed: {each}" for each in verdict.assumed)):
        _put(header, "p", doubt, "dim")
    if path.next_command:
        _put(header, "p", "Run this on the node, and add its output to the input:")
        _put(header, "pre", path.next_command)


def _cause(main: ET.Element, finding: CauseFinding, word: str) -> None:
    section = ET.SubElement(main, "section", {"class": "cause" if finding.explains else "cause other"})
    _put(section, "h2", f"{word}: {finding.sentence}")
    if finding.evidence:
        _put(section, "pre", "\n".join(finding.evidence))
    if finding.advice:
        _with_code(section, finding.advice)
    certain = "This is certain." if finding.certain else "This is likely."
    where = f" On node {finding.node}." if finding.node else ""
    _put(section, "p", f"{certain}{where} More in {finding.cause.page}.", "dim")


class _Outline:
    """Writes the rows of an outline, up to MOST_ROWS of them."""

    def __init__(self) -> None:
        self._left = MOST_ROWS

    def items(self, into: ET.Element, items: Items) -> int:
        """Write rows and splits; return how many are left out."""
        left_out = 0
        for each in items:
            if self._left <= 0:
                left_out += 1
            elif isinstance(each, Row):
                left_out += self._row(into, each)
            else:
                left_out += sum(self._group(into, group) for group in each.groups)
        return left_out

    def _row(self, into: ET.Element, row: Row) -> int:
        self._left -= 1
        place = " place" if row.style is Style.STRONG and not row.stage else ""
        line = ET.SubElement(into, "div", {"class": f"row {row.style.value}{' end' if row.sign else place}"})
        if not place:
            _put(line, "span", SIGNS[row.style] if row.sign else row.stage, "stage")
        cell = ET.SubElement(line, "div")
        _put(cell, "div", row.text)
        for note in row.notes:
            _put(cell, "div", note.text, f"note {note.style.value}")
        return self.items(ET.SubElement(into, "div", {"class": "below"}), row.below) if row.below else 0

    def _group(self, into: ET.Element, group: Group) -> int:
        box = ET.SubElement(into, "div", {"class": f"group {group.heads[0].style.value}"})
        for head in group.heads[: max(self._left, 1)]:
            self._left -= 1
            line = ET.SubElement(box, "div", {"class": "head"})
            _put(line, "span", share_text(head.share))
            cell = ET.SubElement(line, "div")
            _put(cell, "code", head.place)
            _put(cell, "span", head.name)
        return self.items(box, group.rows)
