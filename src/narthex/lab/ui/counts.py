"""New connections of Services from the metrics of the nodes' proxies."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_LINE = re.compile(rb"^narthex_service_new_connections_total\{([^}]*)\} ([0-9.e+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def count(pages: Iterable[bytes]) -> dict[str, int]:
    """Return connections by Service (`shop/web`) since the proxies' start, over the metrics pages of all nodes."""
    total: Counter[str] = Counter()
    for page in pages:
        for labels, value in _LINE.findall(page):
            found = dict(_LABEL.findall(labels.decode(errors="replace")))
            total[f"{found.get('namespace', '')}/{found.get('service', '')}"] += round(float(value))
    return dict(total)
