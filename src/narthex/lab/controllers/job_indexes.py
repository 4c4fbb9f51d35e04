"""Completion indexes of Jobs (kubernetes `pkg/controller/job/indexed_job_utils.go`): which are done, and the pod of one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import groupby, islice

from narthex.lab.api.validation import MOST_INDEXES
from narthex.lab.controllers.objects import Object, spec_of, status_of, with_fields

INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation and label of a pod."""
_VARIABLE = "JOB_COMPLETION_INDEX"


def is_indexed(job: Object) -> bool:
    """Return True if each pod of a Job has an index."""
    return spec_of(job).get("completionMode") == "Indexed"


def index_of(pod: Object) -> int:
    """Return the index of a pod, -1 if it has none."""
    return _index(str((pod["metadata"].get("annotations") or {}).get(INDEX, "")))


def completed_indexes(job: Object) -> set[int]:
    """Return the indexes that the status of a Job lists, such as `0-2,5`."""
    most = min(int(spec_of(job).get("completions") or 0), MOST_INDEXES)
    found: set[int] = set()
    for part in str(status_of(job).get("completedIndexes") or "").split(","):
        first, _, last = part.partition("-")
        ends = _index(first), _index(last or first)
        if min(ends) >= 0:
            found.update(range(ends[0], min(ends[1] + 1, most)))
    return found


def _index(text: str) -> int:
    """Return the index that a text names, -1 for other texts."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MOST_INDEXES)) else -1


def index_text(indexes: Collection[int]) -> str:
    """Return indexes as in a status: three and more that follow each other as a range."""
    parts = []
    for _, group in groupby(enumerate(sorted(indexes)), lambda each: each[1] - each[0]):
        run = [index for _, index in group]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)))
    return ",".join(parts)


def next_indexes(job: Object, taken: Collection[int], count: int) -> list[int]:
    """Return the lowest indexes that are not taken."""
    every = range(int(spec_of(job).get("completions") or 0))
    return list(islice((index for index in every if index not in taken), count))


def with_index(pod: Object, job_name: str, index: int) -> Object:
    """Return a Job's pod with its index: as annotation, label, host name, and environment variable."""
    meta, spec, text = pod["metadata"], pod["spec"], str(index)
    marks = {word: {**(meta.get(word) or {}), INDEX: text} for word in ("labels", "annotations")}
    pod = with_fields(pod, "metadata", generateName=f"{job_name}-{index}-", **marks)
    lists = {
        word: [{**each, "env": list(_environment(each))} for each in spec[word]]
        for word in ("initContainers", "containers")
        if spec.get(word)
    }
    return with_fields(pod, "spec", hostname=f"{job_name}-{index}", **lists)


def _environment(container: Object) -> Iterator[Object]:
    given = container.get("env") or []
    yield from given
    if all(each.get("name") != _VARIABLE for each in given):
        yield {"name": _VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}}
