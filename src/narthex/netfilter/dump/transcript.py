"""What stands around a tool's output in a bug report: prompts, time stamps, carriage returns, marks of a mail or a wiki."""

from __future__ import annotations

import re

import msgspec

from narthex.model.net import IPFamily

_STAMP = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?", re.MULTILINE
)
"""`kubectl logs --timestamps`, and the files of container runtimes."""
_QUOTE = re.compile(r"^> ?", re.MULTILINE)
_PROMPT = re.compile(
    r"^\**(?:\[[^\]]*\]\s*[#$%]|[\w.-]+@[\w.–-]+(?::[^\s]*)?\s*[#$%>]|[➜~]+(?:\s+~)?|[#$%>]|bash-[\d.]+[#$])\s+(?=\S)"
)
_TOOL = re.compile(r"\b(ip6?tables)(?:-nft|-legacy)?(-save)?\b([^|;&]*)")
_TABLE_OPTION = re.compile(r"(?:-t|--table)[ =]?(raw|mangle|nat|filter|security)\b")
_CHAIN = re.compile(r"(?:-\w*[LS]|--list|--list-rules)\s+([A-Z]\S*)")
_KNOWN_TOOLS = re.compile(r"\b(?:ip6?tables|nft|ipset|ipvsadm|kubectl|docker|ip|cat|sudo|grep)\b")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of iptables, as far as it matters to its output."""

    table: str = ""
    """Empty: not said, or not iptables."""
    family: IPFamily | None = None
    chain: str = ""
    """The only one that was asked for."""
    filtered: bool = False
    """Only some lines were kept (`| grep`)."""


def plain(text: str) -> list[str]:
    """The lines, without what others have put before and behind them."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith("\ufeff"):
        text = text[1:]
    head = text[:4000]
    if _STAMP.search(head):
        text = _STAMP.sub("", text)
    if head.count("\n> ") > head.count("\n") // 2:
        text = _QUOTE.sub("", text)
    return text.split("\n")


def command_of(line: str) -> Command | None:
    """The command on a prompt's line; None for a line that is no such thing."""
    prompt = _PROMPT.match(line)
    if prompt is None:
        bare = line.removeprefix("sudo ")
        if not re.match(r"ip6?tables(?:-nft|-legacy)?(?:-save(?: |$)| -)", bare):
            return None
        rest = bare
    else:
        rest = line[prompt.end() :]
        if line.startswith("#") and not re.match(r"(?:sudo )?(?:ip6?tables|nft|ipset|ipvsadm)\b", rest):
            return None
        if not _KNOWN_TOOLS.search(rest):
            return Command()
    tool = _TOOL.search(rest)
    if tool is None:
        return Command()
    table = _TABLE_OPTION.search(tool[3])
    listed = "" if tool[2] else "filter"
    chain = _CHAIN.search(tool[3])
    return Command(
        table=table[1] if table else listed,
        family=IPFamily.IPV6 if tool[1] == "ip6tables" else IPFamily.IPV4,
        chain=chain[1] if chain else "",
        filtered=bool(re.search(r"\|\s*(?:grep|head|tail|sed|awk)", rest)),
    )
