"""The templates of plugin `template`: the part of Go's text/template that Corefiles use.

    {{ .Name }} 60 IN A {{ index .Match 1 }}.{{ .Group.b }}

An expression is a field (`.Name`, `.Zone`, `.Class`, `.Type`, `.Regex`, `.Remote`, `.Question.Name`, `.Group.NAME`),
`index .Match NUMBER`, `index .Group "NAME"`, or `parseInt TEXT BASE BITS`, whose arguments may be expressions in
parentheses. `{{-` and `-}}` trim blanks. Pipelines, conditions, loops, variables, and other functions are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec

_FIELDS = {"Name": "name", "Zone": "zone", "Class": "class_", "Type": "type", "Regex": "regex", "Remote": "remote"}
_ACTION = re.compile(r"\{\{(-(?=\s))?(.*?)((?<=\s)-)?\}\}", re.DOTALL)
_TOKEN = re.compile(r'\s*(?:([()])|("(?:[^"\\\n]|\\.)*"|`[^`]*`)|(-?\d+)|(\.[\w.]*|\w+)|(\S))', re.ASCII)
_KNOWN = "known are .Name, .Zone, .Class, .Type, .Regex, .Remote, .Group.NAME, index .Match NUMBER, and parseInt"
MAX_EXPANDED = 4096
"""Characters of an expanded template; one record of text has less."""


class TemplateError(ValueError):
    """Text that is not a template, or that uses more than the supported part; the message completes a sentence."""


class ExpansionError(ValueError):
    """A template that has no result for a query, such as a group that does not exist."""


class TemplateValues(msgspec.Struct, frozen=True, kw_only=True):
    """The values of a query."""

    name: str
    zone: str
    class_: str
    type: str
    regex: str
    remote: str
    match: tuple[str, ...]
    groups: Mapping[str, str]
    """By name and by number."""


_Expression = Callable[[TemplateValues], str]


class Template(msgspec.Struct, frozen=True):
    """A compiled template."""

    parts: tuple[str | _Expression, ...]

    def expand(self, values: TemplateValues) -> str:
        """Return the text for a query. Raises ExpansionError."""
        text = "".join(part if isinstance(part, str) else part(values) for part in self.parts)
        if len(text) > MAX_EXPANDED:
            raise ExpansionError(f"the record has more than {MAX_EXPANDED} characters")
        return text


@lru_cache(maxsize=1024)
def compile_template(text: str) -> Template:
    """Compile a template. Raises TemplateError."""
    parts: list[str | _Expression] = []
    at, trim = 0, False
    for action in _ACTION.finditer(text):
        parts.append(_plain(text[at : action.start()], trim, bool(action[1])))
        inside = action[2].strip()
        if not re.fullmatch(r"/\*.*\*/", inside, re.DOTALL):
            parts.append(_Parser(inside).parse())
        at, trim = action.end(), bool(action[3])
    parts.append(_plain(text[at:], trim, False))
    return Template(tuple(part for part in parts if part != ""))


def _plain(text: str, trims_start: bool, trims_end: bool) -> str:
    if "{{" in text:
        raise TemplateError("has a {{ without }}")
    text = text.lstrip() if trims_start else text
    return text.rstrip() if trims_end else text


class _Parser:
    """Parses one expression."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [match[0].strip() for match in _TOKEN.finditer(text)]

    def parse(self) -> _Expression:
        """Return the expression of all tokens. Raise an error if tokens are left over."""
        found = self._call()
        if self._tokens:
            raise self._unsupported()
        return found

    def _unsupported(self) -> TemplateError:
        return TemplateError(f"has {{{{ {self._text[:40]} }}}}, which is not supported; {_KNOWN}")

    def _take(self) -> str:
        if not self._tokens:
            raise self._unsupported()
        return self._tokens.pop(0)

    def _call(self) -> _Expression:
        if self._tokens[:1] == ["index"]:
            self._take()
            of, key = self._take(), self._take().strip('"`')
            if of == ".Match" and key.isdecimal():
                number = int(key)
                return lambda values: _group(values.match[number : number + 1], number)
            if of == ".Group":
                return lambda values: values.groups.get(key, "")
            raise self._unsupported()
        if self._tokens[:1] == ["parseInt"]:
            self._take()
            digits, base, bits = self._operand(), self._operand(), self._operand()
            return lambda values: _parse_int(digits(values), base(values), bits(values))
        return self._operand()

    def _operand(self) -> _Expression:
        token = self._take()
        if token == "(":
            found = self._call()
            if self._take() != ")":
                raise self._unsupported()
            return found
        if token[0] in '"`' or token.lstrip("-").isdecimal():
            literal = token.strip('"`')
            return lambda _: literal
        field, _, key = token.removeprefix(".").partition(".")
        if token.startswith(".Group.") and key and "." not in key:
            return lambda values: values.groups.get(key, "")
        if token in (".Question.Name", *(f".{name}" for name in _FIELDS)):
            attribute = "name" if key else _FIELDS[field]
            return lambda values: str(getattr(values, attribute))
        if token.startswith((".Meta", ".Var", ".Message")):
            raise TemplateError(f"has {token}, which is not supported; {_KNOWN}")
        raise self._unsupported()


def _group(found: tuple[str, ...], number: int) -> str:
    if not found:
        raise ExpansionError(f"there is no group {number}")
    return found[0]


def _parse_int(digits: str, base: str, bits: str) -> str:
    try:
        number = int(digits, int(base)) if digits.isalnum() else -1
    except ValueError:
        number = -1
    if not 0 <= number < 1 << (int(bits) or 64):
        raise ExpansionError(f"{digits[:20]!a} is not a number of {bits} bits")
    return str(number)
