"""Marks that people leave where they cut the output of a tool: `...`, `[snip]`, a remark in parentheses."""

from __future__ import annotations

import re

from narthex.netfilter.ast import Rule, RuleGap

_MARK = re.compile(
    r"[\s#*/<\[({-]*+(?:\.{2,}+|…++|\.\s\.\s\.|(?:snip|snipped|cut|truncated|omitted|skipped|省略)\b[^-]{0,80}+)[\s*/>\])}-]*+$",
    re.IGNORECASE,
)
_OMITTED = ("omitted", "truncated", "snipped", "省略")
ENDS = ".…)>] "
"""Last characters of a rule with a mark behind it."""
_LONGEST = 160
"""Characters of a line that can be a mark."""

CUT = "the text is cut here"


def is_cut_mark(line: str) -> bool:
    """Return True for a line that says that lines were left out, and nothing else."""
    if not line or len(line) > _LONGEST or (line.startswith("-A ") and line[-1] not in ENDS):
        return False
    if _MARK.match(line):
        return True
    if not line.rstrip().endswith(("...", "…", ")", ">", "]")):
        return False
    begin = max(line.find(sign) for sign in "(<[")
    return line.rstrip().endswith(("...", "…")) or (begin >= 0 and any(word in line[begin:] for word in _OMITTED))


def gap_rule() -> Rule:
    """Return the rule that stands for those that are missing."""
    return Rule((RuleGap(CUT),))
