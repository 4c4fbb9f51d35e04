"""A path as a graph for other programs to lay out: Graphviz dot, and Mermaid, which many issue trackers render."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from narthex.trace.render.drawing import BoxRow, BranchLane, Drawing, NamespaceArea, StageBox

_LONGEST = 90
_MOST_ROWS = 6


class _Node(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    lines: tuple[str, ...]
    kind: str = "box"
    """`box`, or the kind of an end: `good`, `bad`, `doubt`, `folded`."""
    area: int = -1
    faded: bool = False


class _Edge(msgspec.Struct, frozen=True):
    source: str
    target: str
    label: str = ""


class _Graph:
    """The drawing as nodes and edges. Names are numbers, so that they need no quoting."""

    def __init__(self, drawing: Drawing) -> None:
        self.nodes: list[_Node] = []
        self.edges: list[_Edge] = []
        self.areas: list[str] = []
        start = self._add(_Node(name="n0", lines=(drawing.title, drawing.result), kind="start"))
        self._lane(drawing.trunk, start, "")

    def _add(self, node: _Node) -> str:
        self.nodes.append(node)
        return node.name

    def _next(self) -> str:
        return f"n{len(self.nodes)}"

    def _lane(self, lane: BranchLane, last: str, label: str) -> None:
        def follow(node: _Node) -> None:
            """Add a node and the edge to it from the previous one; the edge uses up the label."""
            nonlocal last, label
            self.edges.append(_Edge(last, self._add(node), label))
            last, label = node.name, ""

        for area in lane.areas:
            number = self._area(area)
            for box in area.boxes:
                follow(_Node(name=self._next(), lines=_lines(box), area=number, faded=not lane.taken))
        for below in lane.lanes:
            self._lane(below, last, below.label)
        if lane.folded:
            self.edges.append(_Edge(last, self._add(_Node(name=self._next(), lines=(lane.folded,), kind="folded"))))
        if lane.end:
            follow(_Node(name=self._next(), lines=(lane.end,), kind=lane.kind, faded=not lane.taken))

    def _area(self, area: NamespaceArea) -> int:
        self.areas.append(area.title)
        return len(self.areas) - 1


def _lines(box: StageBox) -> tuple[str, ...]:
    rows = [_row_text(row) for row in box.rows if not row.faded]
    shown = (
        rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 2], f"… {len(rows) - _MOST_ROWS + 1} more", rows[-1]]
    )
    return (box.stage, *shown, *((box.change,) if box.change else ()))


def _row_text(row: BoxRow) -> str:
    """Return a rule by its chain and its effect: its text is too long for a node of a graph."""
    what = row.where or row.text
    return f"{what} → {row.verdict}" if row.verdict else f"{row.where}: {row.text}" if row.where else row.text


def _label(lines: tuple[str, ...], escape: Callable[[str], str], join: str) -> str:
    # Shortened before it is escaped: an escape cut in two would be syntax.
    return join.join(escape(line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…") for line in lines)


def _inside(graph: _Graph) -> Iterator[tuple[str, list[_Node]]]:
    for number, title in enumerate(graph.areas):
        yield title, [node for node in graph.nodes if node.area == number]


# ---- dot -----------------------------------------------------------------------------------------------------------

_DOT_KINDS = {
    "start": 'shape=oval style=filled fillcolor="#ddf4ff"',
    "good": 'style="rounded,filled" fillcolor="#dafbe1" color="#1a7f37"',
    "bad": 'style="rounded,filled" fillcolor="#ffebe9" color="#cf222e"',
    "doubt": 'style="rounded,filled" fillcolor="#fff8c5" color="#9a6700"',
    "folded": "style=dashed",
}


def dot(drawing: Drawing) -> str:
    """Return the graph for `dot -Tsvg`, ending with a newline."""
    graph = _Graph(drawing)
    lines = ["digraph way {", "  rankdir=TB", '  node [shape=box fontname="sans-serif" fontsize=10]']
    lines.append('  edge [fontname="sans-serif" fontsize=9]')
    for number, (title, nodes) in enumerate(_inside(graph)):
        lines.append(f"  subgraph cluster_{number} {{")
        lines.append(f'    label="{_dot_text(title)}" style="rounded,filled" fillcolor="#f6f8fa" color="#d1d9e0"')
        lines += [f"    {_dot_node(node)}" for node in nodes]
        lines.append("  }")
    lines += [f"  {_dot_node(node)}" for node in graph.nodes if node.area < 0]
    for edge in graph.edges:
        label = f' [label="{_dot_text(edge.label)}"]' if edge.label else ""
        lines.append(f"  {edge.source} -> {edge.target}{label}")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(node: _Node) -> str:
    kind = _DOT_KINDS.get(node.kind, "style=filled fillcolor=white")
    grey = ' fontcolor="#8c959f"' if node.faded else ""
    return f'{node.name} [label="{_label(node.lines, _dot_text, _LINE_END)}" {kind}{grey}]'


_LINE_END = "\\l"


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


# ---- Mermaid -------------------------------------------------------------------------------------------------------

_MERMAID_CLASSES = """\
  classDef good fill:#dafbe1,stroke:#1a7f37,color:#116329
  classDef bad fill:#ffebe9,stroke:#cf222e,color:#a40e26
  classDef doubt fill:#fff8c5,stroke:#9a6700,color:#7d4e00
  classDef folded stroke-dasharray:4
  classDef faded opacity:0.5"""


def mermaid(drawing: Drawing) -> str:
    """Return the graph for a mermaid block, ending with a newline."""
    graph = _Graph(drawing)
    lines = ["flowchart TD"]
    for number, (title, nodes) in enumerate(_inside(graph)):
        lines.append(f'  subgraph a{number}["{_mermaid_text(title)}"]')
        lines += [f"    {_mermaid_node(node)}" for node in nodes]
        lines.append("  end")
    lines += [f"  {_mermaid_node(node)}" for node in graph.nodes if node.area < 0]
    for edge in graph.edges:
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        lines.append(f"  {edge.source} -->{label} {edge.target}")
    lines.append(_MERMAID_CLASSES)
    for node in graph.nodes:
        if node.kind in ("good", "bad", "doubt", "folded"):
            lines.append(f"  class {node.name} {node.kind}")
        if node.faded:
            lines.append(f"  class {node.name} faded")
    return "\n".join(lines) + "\n"


def _mermaid_node(node: _Node) -> str:
    return f'{node.name}["{_label(node.lines, _mermaid_text, "<br/>")}"]'


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:/=()-+→…%!'")


def _mermaid_text(text: str) -> str:
    """Escape a label: Mermaid takes numbered entities without their ampersand."""
    return "".join(c if c in _PLAIN else f"#{ord(c)};" for c in text)
