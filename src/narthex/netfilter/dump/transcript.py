"""Bug reports around a tool's output: prompts, time stamps, carriage returns, and quote marks of mails and wikis."""

from __future__ import annotations

import re

import msgspec

from narthex.model.net import IPFamily

_TIME_STAMP = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d) (?:std(?:out|err) [FP] )?", re.MULTILINE
)
"""`kubectl logs --timestamps`, and the log files of container runtimes."""
_QUOTE = re.compile(r"^> ?", re.MULTILINE)
_PROMPT = re.compile(
    r"^\**(?:\[[^\]]*\]\s*[#$%]|[\w.-]+@[\w.–-]+(?::[^\s]*)?\s*[#$%>]|[➜~]+(?:\s+~)?|[#$%>]|bash-[\d.]+[#$])\s+(?=\S)"
)
_TOOL = re.compile(r"\b(ip6?tables)(?:-nft|-legacy)?(-save)?\b([^|;&]*)")
_TABLE_OPTION = re.compile(r"(?:-t|--table)[ =]?(raw|mangle|nat|filter|security)\b")
_CHAIN = re.compile(r"(?:-\w*[LS]|--list|--list-rules)\s+([A-Z]\S*)")
_KNOWN_TOOLS = re.compile(r"\b(?:ip6?tables|nft|ipset|ipvsadm|kubectl|docker|ip|cat|sudo|grep)\b")


class ShellCommand(msgspec.Struct, frozen=True, kw_only=True):
    """An iptables command at a prompt, as far as it affects the output."""

    table: str = ""
    """Empty if it is not known, or if the command is not iptables."""
    family: IPFamily | None = None
    chain: str = ""
    """The only chain that was requested."""
    filtered: bool = False
    """The output was filtered (`| grep`)."""


def clean_lines(text: str) -> list[str]:
    """Split a text into lines without the prefixes and suffixes that other tools added."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.startswith("\ufeff"):
        text = text[1:]
    head = text[:4000]
    if _TIME_STAMP.search(head):
        text = _TIME_STAMP.sub("", text)
    if head.count("\n> ") > head.count("\n") // 2:
        text = _QUOTE.sub("", text)
    return text.split("\n")


def command_of(line: str) -> ShellCommand | None:
    """Return the command of a line with a prompt, or None for another line."""
    prompt = _PROMPT.match(line)
    if prompt is None:
        rest = line.removeprefix("sudo ")
        if not re.match(r"ip6?tables(?:-nft|-legacy)?(?:-save(?: |$)| -)", rest):
            return None
    else:
        rest = line[prompt.end() :]
        if line.startswith("#") and not re.match(r"(?:sudo )?(?:ip6?tables|nft|ipset|ipvsadm)\b", rest):
            return None
        if not _KNOWN_TOOLS.search(rest):
            return ShellCommand()
    tool = _TOOL.search(rest)
    if tool is None:
        return ShellCommand()
    table = _TABLE_OPTION.search(tool[3])
    default_table = "" if tool[2] else "filter"
    chain = _CHAIN.search(tool[3])
    return ShellCommand(
        table=table[1] if table else default_table,
        family=IPFamily.IPV6 if tool[1] == "ip6tables" else IPFamily.IPV4,
        chain=chain[1] if chain else "",
        filtered=bool(re.search(r"\|\s*(?:grep|head|tail|sed|awk)", rest)),
    )
