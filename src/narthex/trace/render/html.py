"""A path as one self-contained HTML page: no scripts, no fonts, no external pictures.

The result and its causes come first, then the picture; everything else is folded. The page is also well-formed XML. All text goes
through an XML tree, so that untrusted text can't become markup.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from narthex.proxy.plan.show import visible
from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import PacketPath, PathLeaf, PathStep
from narthex.trace.render import svg as render_svg
from narthex.trace.render.drawing import Drawing, draw, percent, verdict

MOST_LEAVES = 20
"""Alternatives that are listed step by step; the others are only counted."""
MOST_STEPS = 200
_LONGEST = 600

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 ui-sans-serif, system-ui, "Segoe UI", Roboto, Arial, sans-serif; margin: 0 auto; max-width: 1080px;
  padding: 1.5rem 1rem 3rem; color: #1f2328; background: #ffffff; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
code, pre { font: 12.5px/1.45 ui-monospace, SFMono-Regular, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
.result { display: inline-block; border: 1px solid; border-radius: 1rem; padding: .05rem .8rem; font-weight: 600; }
.result.good { color: #116329; background: #dafbe1; } .result.bad { color: #a40e26; background: #ffebe9; }
.result.doubt { color: #7d4e00; background: #fff8c5; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .8rem 0; }
dt { color: #59636e; } dd { margin: 0; overflow-wrap: anywhere; }
section.cause { border: 1px solid #cf222e; border-radius: 8px; padding: .6rem 1rem; margin: .8rem 0; background: #ffebe9; }
section.cause.other { border-color: #9a6700; background: #fff8c5; }
section.cause h2, section.cause h3 { margin: .2rem 0 .4rem; font-size: 1.05rem; }
section.cause p { margin: .3rem 0; } .dim { color: #59636e; }
.picture { overflow-x: auto; } .picture svg { max-width: 100%; height: auto; }
details { margin: .4rem 0; } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; vertical-align: top; padding: .2rem .6rem;
  border-bottom: 1px solid #d1d9e0; overflow-wrap: anywhere; } th { font-weight: 600; }
@media (prefers-color-scheme: dark) {
body { color: #e6edf3; background: #0d1117; } .dim, dt { color: #9198a1; } th, td { border-color: #3d444d; }
.result.good { color: #56d364; background: #12261e; } .result.bad { color: #ff9492; background: #301418; }
.result.doubt { color: #e3b341; background: #2b2210; }
section.cause { border-color: #f85149; background: #301418; } section.cause.other { border-color: #d29922; background: #2b2210; }
}
@media print { body { max-width: none; padding: 0; color: #000; background: #fff; } details > * { display: block; } }
"""


def page(path: PacketPath, findings: Sequence[CauseFinding] = ()) -> str:
    """Return the page, ending with a newline."""
    drawing = draw(path)
    html = ET.Element("html", {"xmlns": "http://www.w3.org/1999/xhtml", "lang": "en"})
    head = ET.SubElement(html, "head")
    ET.SubElement(head, "title").text = f"{drawing.title}: {drawing.result}"
    ET.SubElement(head, "style").text = _STYLE
    main = ET.SubElement(ET.SubElement(html, "body"), "main")
    _summary(main, drawing, bool(findings and findings[0].explains))
    for number, finding in enumerate(findings):
        _cause(main, finding, "Why not" if not number else "Also")
    _put(main, "h2", "The path")
    figure = ET.SubElement(main, "figure", {"class": "picture", "style": "margin: 0"})
    figure.append(render_svg.element(drawing, findings, head=False))
    _put(main, "h2", "Step by step")
    leaves = path.leaves()
    for leaf in leaves[:MOST_LEAVES]:
        _leaf(main, leaf, folded=len(leaves) > 1)
    if len(leaves) > MOST_LEAVES:
        _put(main, "p", f"{len(leaves) - MOST_LEAVES} more alternatives are not listed.")
    text = ET.tostring(html, encoding="unicode", short_empty_elements=False)
    # The one element that HTML has no end tag for, and the tree would give it one.
    text = text.replace(
        "<head>", '<head>\n<meta charset="utf-8"/>\n<meta name="viewport" content="width=device-width"/>\n', 1
    )
    return f"<!DOCTYPE html>\n{text}\n"


def _put(into: ET.Element, tag: str, text: str, kind: str = "") -> ET.Element:
    made = ET.SubElement(into, tag)
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    made.text = "\n".join(visible(line) for line in text.split("\n"))
    if kind:
        made.set("class", kind)
    return made


def _summary(main: ET.Element, drawing: Drawing, fails: bool) -> None:
    header = ET.SubElement(main, "header")
    _put(header, "h1", drawing.title)
    said, kind = verdict(drawing, fails)
    _put(header, "span", said, f"result {kind}").set("role", "status")
    facts = ET.SubElement(header, "dl")
    for name, value in drawing.lines:
        _put(facts, "dt", name)
        _put(facts, "dd", value)


def _cause(main: ET.Element, finding: CauseFinding, word: str) -> None:
    section = ET.SubElement(main, "section", {"class": "cause" if finding.explains else "cause other"})
    _put(section, "h2", f"{word}: {finding.sentence}")
    if finding.evidence:
        _put(section, "pre", "\n".join(finding.evidence))
    if finding.advice:
        _put(section, "p", finding.advice)
    certain = "This is certain." if finding.certain else "This is likely."
    where = f" On node {finding.node}." if finding.node else ""
    _put(section, "p", f"{certain}{where} More in {finding.cause.page}.", "dim")


def _leaf(main: ET.Element, leaf: PathLeaf, folded: bool) -> None:
    details = ET.SubElement(main, "details")
    if not folded:
        details.set("open", "open")
    end = leaf.end
    summary = f"{percent(leaf.probability)}: {end.fate.value}"
    summary += f" to {end.address}{f' port {end.port}' if end.port else ''}" if end.address else ""
    summary += (f", {end.name}" if end.name else "") + (f": {end.reason}" if end.reason else "")
    _put(details, "summary", summary)
    table = ET.SubElement(details, "table")
    row = ET.SubElement(ET.SubElement(table, "thead"), "tr")
    for name in ("where", "stage", "what happens", "evidence"):
        _put(row, "th", name).set("scope", "col")
    body = ET.SubElement(table, "tbody")
    for step in leaf.steps[:MOST_STEPS]:
        _step(ET.SubElement(body, "tr"), step)
    if len(leaf.steps) > MOST_STEPS:
        _put(details, "p", f"{len(leaf.steps) - MOST_STEPS} more steps are not listed.")


def _step(row: ET.Element, step: PathStep) -> None:
    _put(row, "td", f"{step.node} {step.namespace}".strip() or "this node")
    _put(row, "td", step.stage.value)
    cell = ET.SubElement(row, "td")
    if step.chain:
        _put(cell, "code", f"{step.table} {step.chain}: {step.rule or step.what}")
    if step.what and not (step.chain and not step.rule):
        _put(cell, "div", step.what)
    for text in (step.verdict and f"does: {step.verdict}", step.why, step.unknown and f"not known: {step.unknown}"):
        if text:
            _put(cell, "div", text, "dim")
    for miss in step.near[:10]:
        _put(cell, "div", f"not met: {miss.rule}: {miss.missing}", "dim")
    _put(row, "td", "\n".join(filter(None, (*step.evidence, step.place))) or " ")
