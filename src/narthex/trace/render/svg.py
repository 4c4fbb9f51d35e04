"""A path as one SVG picture: namespaces as areas, hooks as boxes on the packet's line, the end, and the first cause.

It is self-contained, supports light and dark mode, and prints. All text goes through an XML tree, so that untrusted text can't
become markup. Lengths are in pixels.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence

from narthex.trace.causes.catalogue import CauseFinding
from narthex.trace.model import Fate
from narthex.trace.render.drawing import BoxRow, BranchLane, Drawing, NamespaceArea, StageBox, clean, verdict

WIDTH = 1040
_EDGE = 20
_INDENT = 36
_MOST_INDENT = 8
_SPINE = 12
_AREA_LEFT = 34
_LINE = 18
_MONO = 7.3
"""Greatest width of a character of the rows' font at 12 px; wider fonts have room on the right."""
_CHIP = 6.9
"""The same of the verdicts' font at 11 px."""
_SANS = 6.7
_GUTTER = 104
_LEAST_WIDTH = 420

STYLE = """
.nx text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1f2328; }
.nx .mono { font-family: ui-monospace, SFMono-Regular, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 12px; }
.nx .paper { fill: #ffffff; }
.nx .h1 { font-size: 18px; font-weight: 600; }
.nx .strong { font-weight: 600; }
.nx .dim { fill: #59636e; }
.nx .stage { font-size: 11px; font-weight: 600; fill: #59636e; }
.nx .area { fill: #f6f8fa; stroke: #d1d9e0; }
.nx .box { fill: #ffffff; stroke: #d1d9e0; }
.nx .spine { stroke: #0969da; stroke-width: 3; fill: none; stroke-linecap: round; }
.nx .dot { fill: #0969da; stroke: #ffffff; stroke-width: 2; }
.nx .chip { fill: #ddf4ff; stroke: none; }
.nx .chip-text { fill: #0550ae; font-size: 11px; }
.nx .chip.stop { fill: #ffebe9; } .nx .chip-text.stop { fill: #b3121d; }
.nx .chip.nat { fill: #fbefff; } .nx .chip-text.nat { fill: #6639ba; }
.nx .change { fill: #6639ba; }
.nx .good { fill: #dafbe1; stroke: #1a7f37; } .nx .good-text { fill: #116329; font-weight: 600; font-size: 13px; }
.nx .bad { fill: #ffebe9; stroke: #cf222e; } .nx .bad-text { fill: #a40e26; font-weight: 600; font-size: 13px; }
.nx .doubt { fill: #fff8c5; stroke: #9a6700; } .nx .doubt-text { fill: #7d4e00; font-weight: 600; font-size: 13px; }
.nx .faded { opacity: .5; }
@media (prefers-color-scheme: dark) {
.nx text { fill: #e6edf3; }
.nx .paper { fill: #0d1117; }
.nx .dim, .nx .stage { fill: #9198a1; }
.nx .area { fill: #151b23; stroke: #3d444d; }
.nx .box { fill: #0d1117; stroke: #3d444d; }
.nx .spine { stroke: #4493f8; } .nx .dot { fill: #4493f8; stroke: #0d1117; }
.nx .chip { fill: #121d2f; } .nx .chip-text { fill: #79c0ff; }
.nx .chip.stop { fill: #3c1618; } .nx .chip-text.stop { fill: #ff9492; }
.nx .chip.nat { fill: #271a45; } .nx .chip-text.nat, .nx .change { fill: #d2a8ff; }
.nx .good { fill: #12261e; stroke: #3fb950; } .nx .good-text { fill: #56d364; }
.nx .bad { fill: #301418; stroke: #f85149; } .nx .bad-text { fill: #ff9492; }
.nx .doubt { fill: #2b2210; stroke: #d29922; } .nx .doubt-text { fill: #e3b341; }
}
@media print {
.nx text { fill: #000000; } .nx .paper, .nx .box { fill: #ffffff; } .nx .area { fill: #f6f8fa; stroke: #888888; }
.nx .dim, .nx .stage { fill: #444444; }
}
"""

_FAILS = "\N{MULTIPLICATION X}"
_SIGNS = {Fate.DELIVERED: "\N{CHECK MARK}", Fate.LEAVES: "\N{RIGHTWARDS ARROW}", Fate.UNKNOWN: "?"}


def svg(drawing: Drawing, findings: Sequence[CauseFinding] = ()) -> str:
    """Return the picture as a file, ending with a newline."""
    root = element(drawing, findings)
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def element(drawing: Drawing, findings: Sequence[CauseFinding] = (), head: bool = True) -> ET.Element:
    """Return the picture as an element. `head` adds title, both parties, and the first cause."""
    return _Painter(drawing, findings, head).root


def wrapped(text: str, width: float, character: float = _MONO) -> list[str]:
    """Return the lines of a text that fit a width."""
    room = max(int(width / character), 8)
    lines, line = [], ""
    for word in text.split(" "):
        while len(word) > room:
            if line:
                lines.append(line)
                line = ""
            lines.append(word[:room])
            word = word[room:]
        if line and len(line) + 1 + len(word) > room:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}" if line else word
    return [*lines, line] if line or not lines else lines


class _Painter:
    def __init__(self, drawing: Drawing, findings: Sequence[CauseFinding], head: bool) -> None:
        self.root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "nx", "role": "img"})
        self._last_dot = 0.0
        self.root.set("aria-labelledby", "nx-title nx-description")
        ET.SubElement(self.root, "title", id="nx-title").text = f"{drawing.title}: {drawing.result}"
        described = [f"{name} {value}" for name, value in drawing.lines]
        described += [f"first cause: {findings[0].sentence}"] if findings else []
        ET.SubElement(self.root, "desc", id="nx-description").text = clean(". ".join(described))
        ET.SubElement(self.root, "style").text = STYLE
        paper = ET.SubElement(self.root, "rect", {"class": "paper", "x": "0", "y": "0"})
        y = 0.0
        if head:
            y = self._head(drawing, findings)
        y = self._lane(self.root, drawing.trunk, _EDGE, y + 16, 0)
        height = str(round(y + _EDGE))
        for each in (self.root, paper):
            each.set("width", str(WIDTH))
            each.set("height", height)
        self.root.set("viewBox", f"0 0 {WIDTH} {height}")

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _text(self, into: ET.Element, x: float, y: float, text: str, kind: str = "") -> None:
        drawn = ET.SubElement(into, "text", {"x": _n(x), "y": _n(y)})
        if kind:
            drawn.set("class", kind)
        drawn.text = text

    def _texts(
        self, into: ET.Element, x: float, y: float, lines: Sequence[str], kind: str = "", step: float = _LINE
    ) -> float:
        """Draw lines below each other; return the y coordinate of the next one."""
        for line in lines:
            self._text(into, x, y, line, kind)
            y += step
        return y

    def _rect(self, into: ET.Element, x: float, y: float, width: float, height: float, kind: str, round_: int) -> None:
        ET.SubElement(
            into,
            "rect",
            {"x": _n(x), "y": _n(y), "width": _n(width), "height": _n(height), "rx": str(round_), "class": kind},
        )

    def _line(self, into: ET.Element, path: str) -> ET.Element:
        return ET.SubElement(into, "path", {"class": "spine", "d": path})

    # ---- head ------------------------------------------------------------------------------------------------------

    def _head(self, drawing: Drawing, findings: Sequence[CauseFinding]) -> float:
        title = wrapped(drawing.title, WIDTH - 2 * _EDGE, 10)
        y = self._texts(self.root, _EDGE, _EDGE + 18.0, title, "h1", 24)
        said, kind = verdict(drawing, bool(findings and findings[0].explains))
        width = len(said) * 7.2 + 32
        self._rect(self.root, _EDGE, y - 10, width, 24, kind, 12)
        self._text(self.root, _EDGE + 14, y + 6.5, said, f"{kind}-text")
        y += 36
        for name, value in drawing.lines:
            self._text(self.root, _EDGE, y, name, "dim")
            y = self._texts(self.root, _EDGE + 90, y, wrapped(value, WIDTH - 2 * _EDGE - 90, _SANS))
        return self._cause(findings[0], y) if findings else y

    def _cause(self, first: CauseFinding, y: float) -> float:
        group = ET.SubElement(self.root, "g", role="group")
        ET.SubElement(group, "title").text = "Why not: the first cause"
        inside = WIDTH - 2 * _EDGE - 32
        lines = [(line, "bad-text") for line in wrapped(clean(f"Why not: {first.sentence}"), inside, 7.8)]
        lines += [(line, "mono") for each in first.evidence[:6] for line in wrapped(clean(each), inside)[:3]]
        lines += [(line, "") for line in wrapped(clean(first.advice), inside, _SANS)] if first.advice else []
        likely = "certain" if first.certain else "likely"
        lines.append((f"{likely}; more in {first.cause.page}", "dim"))
        height = len(lines) * _LINE + 18
        self._rect(group, _EDGE, y, WIDTH - 2 * _EDGE, height, "bad", 8)
        y += 22
        for line, kind in lines:
            self._text(group, _EDGE + 16, y, line, kind)
            y += _LINE
        return y + 4

    # ---- lanes -----------------------------------------------------------------------------------------------------

    def _lane(self, into: ET.Element, lane: BranchLane, x: float, y: float, depth: int) -> float:
        """Draw a lane and everything below it; return the y coordinate of its end."""
        group = ET.SubElement(into, "g")
        if not lane.taken:
            group.set("class", "faded")
        spine = self._line(group, "")
        top = y
        if lane.label:
            self._text(group, x + _AREA_LEFT, y + 4, lane.label, "strong")
            y += 14
        for area in lane.areas:
            y = self._area(group, area, x, y)
        bottom = y
        step = _INDENT if depth < _MOST_INDENT else 0
        for below in lane.lanes:
            elbow = self._line(group, _elbow(x + _SPINE, y, x + step + _SPINE, y + 14))
            elbow.set("class", "spine" if below.taken else "spine faded")
            bottom = y
            y = self._lane(group, below, x + step, y + 14, depth + 1)
        if lane.folded:
            folded = wrapped(lane.folded, self._room(x), _SANS)
            y = self._texts(group, x + _AREA_LEFT, y + 10, folded, "dim") - 6
        if lane.end:
            bottom = y + 16
            y = self._end(group, lane, x, y)
        spine.set("d", f"M{_n(x + _SPINE)} {_n(top)}V{_n(max(bottom, top))}")
        if lane.reply_end:
            y = self._reply(group, lane, x, y)
        return y

    def _room(self, x: float) -> float:
        return max(WIDTH - _EDGE - x - _AREA_LEFT, _LEAST_WIDTH)

    def _area(self, into: ET.Element, area: NamespaceArea, x: float, y: float) -> float:
        group = ET.SubElement(into, "g", role="group")
        ET.SubElement(group, "title").text = area.title
        place = len(group)
        left, width = x + _AREA_LEFT, self._room(x)
        start = y
        y += 20
        self._text(group, left + 12, y, area.title, "strong")
        y += 10
        for box in area.boxes:
            y = self._box(group, box, x, left + 8, width - 16, y)
        frame = ET.Element("g")
        self._rect(frame, left, start, width, y - start + 2, "area", 8)
        group.insert(place, frame)
        return y + 12

    def _box(self, into: ET.Element, box: StageBox, x: float, left: float, width: float, y: float) -> float:
        group = ET.SubElement(into, "g")
        place = len(group)
        start = y
        text_left = left + _GUTTER
        room = width - _GUTTER - 10
        y += 17
        if box.stage:
            self._text(group, left + 10, y, box.stage, "stage")
        for row in box.rows:
            y = self._row(group, row, text_left, room, y)
        if box.change:
            y = self._texts(group, text_left, y, wrapped(box.change, room, _SANS), "change")
        frame = ET.Element("g")
        self._rect(frame, left, start, width, y - start - 8, "box", 6)
        group.insert(place, frame)
        self._line(group, f"M{_n(x + _SPINE)} {_n(start + 13)}H{_n(left)}")
        self._last_dot = start + 13
        ET.SubElement(group, "circle", {"cx": _n(x + _SPINE), "cy": _n(start + 13), "r": "5.5", "class": "dot"})
        return y - 2

    def _row(self, into: ET.Element, row: BoxRow, left: float, room: float, y: float) -> float:
        group = ET.SubElement(into, "g")
        if row.faded:
            group.set("class", "faded")
        chip_width = len(row.verdict) * _CHIP + 16 if row.verdict else 0
        text = f"{row.where}: {row.text}" if row.where else row.text
        longest = max(map(len, text.split(" "))) * _MONO
        # A verdict that leaves no room for the words of the rule has lines of its own.
        inline = chip_width and chip_width <= room - 8 - max(longest, room / 2)
        lines = wrapped(text, room - chip_width - 8 if inline else room)
        if inline:
            self._chip(group, left + room - chip_width, y, row.verdict, chip_width)
        y = self._texts(group, left, y, lines, "mono")
        if chip_width and not inline:
            for part in wrapped(row.verdict, room - 16, _CHIP):
                self._chip(group, left, y, part, len(part) * _CHIP + 16, _chip(row.verdict))
                y += _LINE + 2
        notes = wrapped(row.note, room, _SANS) if row.note else ()
        return self._texts(group, left, y - 1, notes, "dim", _LINE - 1) + 1

    def _chip(self, into: ET.Element, x: float, y: float, text: str, width: float, kind: str | None = None) -> None:
        kind = _chip(text) if kind is None else kind
        self._rect(into, x, y - 13, width, 18, f"chip{kind}", 9)
        self._text(into, x + 8, y, text, f"mono chip-text{kind}")

    def _end(self, into: ET.Element, lane: BranchLane, x: float, y: float) -> float:
        fate = lane.fate or Fate.UNKNOWN
        sign = _SIGNS.get(fate, _FAILS) if lane.kind != "bad" else _FAILS
        left, width = x + _AREA_LEFT, self._room(x)
        lines = wrapped(lane.end, width - 60, 7.6)
        height = len(lines) * _LINE + 14
        group = ET.SubElement(into, "g")
        self._rect(group, left, y, width, height, lane.kind, 8)
        self._line(group, f"M{_n(x + _SPINE)} {_n(y + 16)}H{_n(left)}")
        self._text(group, left + 12, y + 20, sign, f"{lane.kind}-text")
        self._texts(group, left + 34, y + 20, lines, f"{lane.kind}-text")
        return y + height + 10

    def _reply(self, into: ET.Element, lane: BranchLane, x: float, y: float) -> float:
        """Draw the path of the reply in short form, with whether the sender accepts it."""
        good = lane.reply_end == Fate.DELIVERED.value
        group = ET.SubElement(into, "g", role="group")
        ET.SubElement(group, "title").text = "The path of the reply"
        self._text(group, x + _AREA_LEFT, y + 10, "the path of the reply", "strong")
        y += 20
        spine = self._line(group, "")
        top = y
        for area in lane.reply:
            y = self._area(group, area, x, y)
        if lane.reply:
            spine.set("d", f"M{_n(x + _SPINE)} {_n(top)}V{_n(self._last_dot)}")
        kind = "good-text" if good else "bad-text"
        answer = wrapped(f"the answer: {lane.reply_end}", self._room(x), 7.6)
        return self._texts(group, x + _AREA_LEFT, y + 8, answer, kind)


def _chip(verdict: str) -> str:
    word = verdict.removeprefix("policy ").partition(" ")[0]
    if word in ("drop", "reject", "unreachable", "blackhole", "prohibit"):
        return " stop"
    return " nat" if word in ("dnat", "snat", "masquerade", "redirect") else ""


def _elbow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f"M{_n(x)} {_n(y - 4)}C{_n(x)} {_n(to_y)} {_n(to_x)} {_n(y)} {_n(to_x)} {_n(to_y)}"


def _n(value: float) -> str:
    return f"{value:g}" if value == int(value) else f"{value:.1f}"
