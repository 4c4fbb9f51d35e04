"""The JSON document of a traced path; docs/reference/json.md describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from narthex.trace.causes.catalogue import CauseFinding, FindingRecord, finding_records
from narthex.trace.follow.align import Alignment
from narthex.trace.model import PacketPath, WeightedEnd


class ProbeRecord(Alignment, frozen=True, kw_only=True):
    """A probe packet and how the kernel's account of it compares with the prediction."""

    flow: str
    answer: str
    """`nothing`, `connected`, or the error that the sender received."""


class TraceDocument(PacketPath, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """What `narthex trace -o json` prints."""

    version: Literal[1] = 1
    all_ends: tuple[WeightedEnd, ...] = msgspec.field(default=(), name="ends")
    """The ends of all branches, most probable first."""
    findings: tuple[FindingRecord, ...] = ()
    """Causes of a failure, the first cause first; empty if the path is healthy."""
    probe: ProbeRecord | None = None
    """Set after `--probe`."""


def trace_document(
    path: PacketPath, findings: Sequence[CauseFinding] = (), probe: ProbeRecord | None = None
) -> TraceDocument:
    """Return the document for a path."""
    fields = {name: getattr(path, name) for name in PacketPath.__struct_fields__}
    return TraceDocument(**fields, all_ends=path.weighted_ends(), findings=finding_records(findings), probe=probe)
