"""Write the JSON Schema of all documents that commands print with `-o json`: `python scripts/schemas.py`.

With `-` the schema is printed instead. It is generated from the types, so it can't differ from what the commands print.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from narthex.cli.cleanup import CleanupDocument
from narthex.cli.cni import CniGcDocument, CniInstallDocument, CniUninstallDocument
from narthex.cli.lab.conformance import LabConformanceDocument
from narthex.cli.lab.faults import FaultDocument, FaultEndDocument, FaultKillDocument
from narthex.cli.lab.history import RecordDocument
from narthex.cli.lab.output import LabDownDocument, LabListDocument, LabStateDocument, LabStatusDocument, LabUpDocument
from narthex.cli.render import RenderDocument
from narthex.lab.program.recording import ReplaySummary
from narthex.lb.why import ServiceExplanation
from narthex.proxy.plan.document import PlanDocument
from narthex.trace.document import TraceDocument
from narthex.trace.node.layout import BundleDocument
from narthex.trace.program.agent_server import TOOLS, tool
from narthex.trace.program.issue import IssueDocument
from narthex.trace.proof.changes import ChangesDocument
from narthex.trace.proof.prove import ProofDocument
from narthex.trace.query.answer import QueryDocument
from narthex.trace.reports.check import CheckDocument
from narthex.trace.reports.counting import TopDocument
from narthex.trace.reports.difference import DiffDocument
from narthex.trace.reports.migration.report import MigrationDocument

VERSION = 1
"""Of all documents: their field `version`."""
FILE = Path(__file__).parents[1] / "docs" / "reference" / "schemas" / f"narthex.v{VERSION}.json"
TOOLS_FILE = FILE.with_name("agent-tools.v1.json")
DOCUMENTS = (
    TraceDocument,
    CheckDocument,
    ProofDocument,
    QueryDocument,
    DiffDocument,
    ChangesDocument,
    TopDocument,
    MigrationDocument,
    PlanDocument,
    ServiceExplanation,
    BundleDocument,
    IssueDocument,
    RenderDocument,
    CleanupDocument,
    CniGcDocument,
    CniInstallDocument,
    CniUninstallDocument,
    LabUpDocument,
    LabStateDocument,
    LabStatusDocument,
    LabListDocument,
    LabDownDocument,
    LabConformanceDocument,
    FaultDocument,
    FaultEndDocument,
    FaultKillDocument,
    RecordDocument,
    ReplaySummary,
)
HEAD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": f"Narthex documents, version {VERSION}",
    "description": "What narthex prints with -o json; the field kind says which command printed it.",
}


def schema() -> dict[str, Any]:
    """Return the schema: one definition for each type, and any of the documents at the top."""
    references, definitions = msgspec.json.schema_components(
        DOCUMENTS, schema_hook=_fraction, ref_template="#/$defs/{name}"
    )
    for kind in _structs(*DOCUMENTS):
        definition = definitions[kind.__name__]
        # Commands always print all fields, also those that have their default.
        definition["required"] = list(definition["properties"])
        for name, text in _field_texts(kind).items():
            definition["properties"][name] = {**definition["properties"][name], "description": text}
    return {**HEAD, "anyOf": list(references), "$defs": dict(sorted(definitions.items()))}


def _structs(*kinds: object) -> set[type[msgspec.Struct]]:
    """Return the Struct types that documents consist of."""
    found: set[type[msgspec.Struct]] = set()
    pending = [msgspec.inspect.type_info(kind) for kind in kinds]
    while pending:
        each = pending.pop()
        if isinstance(each, msgspec.inspect.StructType) and each.cls not in found:
            found.add(each.cls)
            pending += [field.type for field in each.fields]
        pending += getattr(each, "types", ())
        pending += [each.item_type] if hasattr(each, "item_type") else getattr(each, "item_types", ())
    return found


def _field_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the string literal below each field, by the field's name in JSON."""
    encoded = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("narthex."):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in itertools.pairwise(tree.body):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    assert isinstance(field.target, ast.Name) and isinstance(below.value, ast.Constant)
                    texts[encoded[field.target.id]] = " ".join(str(below.value.value).split())
    return texts


def _fraction(kind: type) -> dict[str, Any]:
    if kind is Fraction:
        return {"type": "string", "pattern": r"^\d+(/\d+)?$", "description": 'An exact fraction: "1/3", "1".'}
    raise NotImplementedError(kind)


def text() -> str:
    """Return the file's content."""
    return _indented(schema())


def tools_text() -> str:
    """Return the content of the file of the tools of `narthex mcp`."""
    tools = (tool(name) for name in TOOLS)
    described = {
        each.name: {"description": each.description, "request": each.input_schema, "answer": each.output_schema}
        for each in tools
    }
    return _indented({"title": "Tools of narthex mcp, version 1", "tools": described})


def _indented(document: object) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["-"]:
        print(text(), end="")
    else:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text())
        TOOLS_FILE.write_text(tools_text())
