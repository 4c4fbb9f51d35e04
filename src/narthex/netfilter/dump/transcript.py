"""Bug reports around a tool's output: prompts, prefixes of logs, carriage returns, and quote marks of mails and wikis."""

from __future__ import annotations

import re

import msgspec

from narthex.model import IPFamily
from narthex.netfilter.cuts import is_cut_mark

_LOG_PREFIX = re.compile(
    r"^(?:\[[\w./-]++\] )?"
    r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d++)?(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?"
    r"|\w{1,9}\.? {1,2}\d{1,2} \d\d:\d\d:\d\d(?:\.\d++)? )"
    r"(?:[\w.-]++ [\w./@-]++(?:\[\d++\])?: )?"
    r"|^\[pods?/[\w./-]++\] ",
    re.MULTILINE,
)
"""`kubectl logs --timestamps` and `--prefix`, the log files of container runtimes, and journald, short and with ISO time."""
_QUOTE = re.compile(r"^> ?", re.MULTILINE)
_COLOR = re.compile(r"\x1b(?:\[[0-9;?]*+[A-Za-z]|\][^\x07\x1b\n]{0,200}+(?:\x07|\x1b\\)|[()][A-B0])")
"""Escape sequences of terminals: colors, bracketed paste, the title of the window."""
_NUMBER = re.compile(r"^(?: *+\d++\t|\d++:(?=-|\*|#|:[A-Z]|\[\d++:|\t|table |chain |\}|COMMIT|$))", re.MULTILINE)
"""Line numbers of `cat -n` and `grep -n`."""
_TYPOGRAPHIC = str.maketrans("“”„", '"""')
_DASH = re.compile(r"(?<=\s)[–—](?=[a-z])")
"""Two hyphens that a program for texts made one dash."""
_HEAD = 4000
"""Characters that show whether lines have a prefix."""
_MAX_PROMPT = 160
_MAX_WRAPPED = 1 << 20
"""Characters of a text that a person may have copied from a terminal; in a longer one, no wrapped lines are searched."""
_LEAST_WIDTH, _FEWEST_WRAPPED = 80, 2
"""Columns of a terminal, and lines that show its width."""
_RULE_BEGIN = re.compile(r"(?:\[\d++:\d++\] )?-A |\t\t++\S| {16,}+\S")
_BEGIN = re.compile(
    r"\s\s|\s*+$|\t|(?:\[\d++:\d++\] )?-[ANPIXFD] |:\S++ (?:ACCEPT|DROP|-)(?:\s|$)|\*\w++\s*+$|#|\}|COMMIT|Chain |table |chain |set |map |-> |```"
)
_WRAPPED = re.compile(
    r"^(?:(?:\[\d++:\d++\] )?-A [^\n]{60,}+|(?:\t\t++| {16,}+)\S[^\n]{40,}+)\n(?!\s\s|[\t\n#}]|(?:\[\d++:\d++\] )?-[ANPIXFD] |COMMIT|\Z)",
    re.MULTILINE,
)
"""A long rule before a line that does not begin another one."""
_LISTING = re.compile(r"^Chain \S++ \(", re.MULTILINE)
_LISTED = re.compile(r"\s*+(?:\S++\s++){1,5}?(?:--|-f|!f)\s++\S|\s*+(?:num\s++)?(?:pkts\s++bytes\s++)?target\s")
"""A rule in a listing of `iptables -L`, or the names of its columns."""
_LISTED_BEGIN = re.compile(r"\s*+$|Chain |#|```|\*\w++\s*+$|COMMIT|-[ANP] ")
"""What is no part of a listed rule. A column may be wrapped in front of its spaces."""
_COLUMN_GAP = 20
"""The most spaces between two columns of a listing, which a terminal loses at the end of a line."""
_PROMPT = re.compile(
    r"\**(?:\[[^\]]*+\]\s*+[#$%>]|\([^)\s]*+\)\s?[#$%>]|[➜~»❯]++(?:\s+~)?|[#$%>]|[^\s#$%>]*[\w~/\\)\]–-](?: ~)?\s?[#$%>]|\S*+ {1,2}~)\s+(?=\S)"
)
"""A prompt: `[user@node ~]$`, `(node)$`, `➜ ~`, `#`, `/ #`, `user@node:~$`, `sh-5.1#`, `node ~ #`."""
_LOOSE_PROMPT = re.compile(
    r"[^*|]{0,100}?[#$%>]\s+(?=(?:sudo (?:-\S+ )*)?(?:ip6?tables\S*|nft|ipset|ipvsadm|ip|kubectl|docker) )|[^*|]{0,100}?[#$%>]\s+(?=(?:sudo )?ip6?tables\S*-save$)"
)
"""Any other prompt, before a command that is known."""
_RULE_LINE = ("-", ":", "|", "{", "}")
_TOOL_NAME = r"(ip6?tables)(?:-(nft|legacy))?(-save)?"
_TOOL = re.compile(rf"(?<![\w.-]){_TOOL_NAME}(?![\w.-])([^|;&#]*)")
_BARE_COMMAND = re.compile(
    r"(?:sudo )?(?:(?:kubectl|docker|podman|crictl|nerdctl|nsenter|minikube|oc|ssh) \S[^|;]*? (?:-- ?)?)?(?:ip6?tables(?:-nft|-legacy)?(?:-save(?:\s|$)| +-)|nft (?:-\S+ )*list |ipvsadm -|ipset (?:list|save|-L)|ip (?:-\S+ )*(?:a|addr|address|r|route|rule|l|link|neigh)(?:\s|$))"
)
"""A command without a prompt."""
_TABLE_OPTION = re.compile(r"(?:-\w*t|--table)[ =]?\s*(raw|mangle|nat|filter|security)\b")
_CHAIN = re.compile(r"(?:-\w*[LS]\w*|--list|--list-rules)\s+([A-Z]\S*)")
_FILTER = re.compile(r"\|\s*(?:e?grep|head|tail|sed|awk)\b")
_NFT_PART = re.compile(r"(?<![\w.-])nft\b[^|;&]*?\blist (?:table|chain|set|map)\b")
_KNOWN_TOOLS = re.compile(r"(?<![\w.-])(?:ip6?tables\S*|nft|ipset|ipvsadm|kubectl|docker|ip|cat|sudo|grep)(?![\w.-])")


class ShellCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command at a prompt, as far as it affects the output."""

    table: str = ""
    """Table of iptables. Empty if it is unknown, or if the command is not iptables."""
    family: IPFamily | None = None
    flavour: str = ""
    """`nft` or `legacy`, if the name of the command says it."""
    chain: str = ""
    """The only chain that was requested."""
    filtered: str = ""
    """The filter of the output (`grep nginx`), if there is one."""
    whole: bool = False
    """The command prints all tables of its family: iptables-save without a table and without a filter."""
    part: bool = False
    """The command prints one table, chain, set, or map of nft."""


def clean_lines(text: str) -> list[str]:
    """Split a text into lines without the prefixes and suffixes that other tools added."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith("\ufeff"):
        text = text[1:]
    if "\x1b" in text:
        text = _COLOR.sub("", text)
    head = text[:_HEAD]
    if 2 * len(_NUMBER.findall(head)) > head.count("\n"):
        text = _NUMBER.sub("", text)
        head = text[:_HEAD]
    if "“" in text or "–" in text or "—" in text:
        text = _DASH.sub("--", text.translate(_TYPOGRAPHIC))
        head = text[:_HEAD]
    if _LOG_PREFIX.search(head):
        text = _LOG_PREFIX.sub("", text)
        head = text[:_HEAD]
    if head.count("\n> ") > head.count("\n") // 2:
        text = _QUOTE.sub("", text)
    lines = text.split("\n")
    if len(text) <= _MAX_WRAPPED and (_WRAPPED.search(text) or _LISTING.search(text)):
        _join(lines)
    return lines


def _join(lines: list[str]) -> None:
    """Join, in place, the rules that a terminal has wrapped. Empty lines stay for the parts, so that numbers of lines hold.

    All lines that a terminal wraps have its width, unless a space at their end was lost. Where a line has another length, it
    stays as it is, and the parser names it.
    """
    listed = [_LISTED.match(line) is not None for line in lines]
    begins = [listed[n] or _RULE_BEGIN.match(line) is not None for n, line in enumerate(lines)]
    cut = [n for n in range(len(lines) - 1) if not listed[n + 1] and _goes_on(lines[n + 1], listed[n])]
    wrapped = [n for n in cut if begins[n]]
    width = max((len(lines[n].expandtabs()) for n in wrapped), default=0)
    if width < _LEAST_WIDTH or any(len(line.expandtabs()) > width for n, line in enumerate(lines) if begins[n]):
        return
    if sum(width - len(lines[n].expandtabs()) in (0, 1) for n in cut) < _FEWEST_WRAPPED:
        return
    for first in wrapped:
        whole, number = lines[first], first
        while number + 1 < len(lines) and not listed[number + 1] and _goes_on(lines[number + 1], listed[first]):
            short = width - len((lines[number] if number > first else whole).expandtabs())
            if not 0 <= short <= (_COLUMN_GAP if listed[first] else 1):
                break
            number += 1
            whole += " " * short + lines[number]
            if number > first + 1:
                lines[number - 1] = ""
        if number > first:
            lines[first], lines[number] = whole, ""


def _goes_on(line: str, listed: bool) -> bool:
    """Return True for a line that can begin nothing of a dump but a listed rule. `listed`: the line before is of a listing."""
    begin = _LISTED_BEGIN if listed else _BEGIN
    return bool(line) and begin.match(line) is None and command_of(line) is None and not is_cut_mark(line)


def command_of(line: str) -> ShellCommand | None:
    """Return the command of a line with a prompt, or None for another line."""
    if line.startswith(_RULE_LINE):
        return None
    prompt = _PROMPT.match(line, 0, _MAX_PROMPT) or _LOOSE_PROMPT.match(line)
    if prompt is None:
        if _BARE_COMMAND.match(line) is None:
            return None
        rest = line
    else:
        rest = line[prompt.end() :]
        known = _KNOWN_TOOLS.match(rest) is not None
        if not known and (
            line.startswith("#") or rest[:1] in "/*|<>-=(" or _KNOWN_TOOLS.search(rest, 0, _MAX_PROMPT) is None
        ):
            # `#` begins remarks, too. Any other command ends the output of the one before.
            return None if line.startswith("#") or not rest[:1].isalpha() else ShellCommand()
    tool = _TOOL.search(rest)
    if tool is None:
        return ShellCommand(part=_NFT_PART.search(rest) is not None)
    arguments = tool[4]
    table = _TABLE_OPTION.search(arguments)
    chain = _CHAIN.search(arguments)
    filtered = _FILTER.search(rest, tool.end())
    return ShellCommand(
        table=table[1] if table else "" if tool[3] else "filter",
        family=IPFamily.IPV6 if tool[1] == "ip6tables" else IPFamily.IPV4,
        flavour=tool[2] or "",
        chain=chain[1] if chain else "",
        filtered=" ".join(rest[filtered.start() :].strip("| ").split())[:80] if filtered else "",
        whole=bool(tool[3]) and not table and not filtered,
    )
