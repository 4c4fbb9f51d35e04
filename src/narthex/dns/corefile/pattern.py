"""Regular expressions that users write: the syntax of Go's `regexp` (RE2), matched in linear time.

Python's `re` backtracks, so that one pattern and one name can occupy a worker for years. Here, a match visits each pair of
instruction and position at most once: at most `MAX_INSTRUCTIONS` times the length of the text. As in Go, there are no
backreferences and no look-around.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from functools import lru_cache

import msgspec

MAX_INSTRUCTIONS = 1000
"""Size of a compiled pattern. Patterns of Corefiles have some dozens."""
MAX_PATTERN = 10_000
"""Characters of a pattern, as in CoreDNS."""
MAX_TEXT = 1100
"""Characters of a text that are looked at. A name has at most 1,004 with all its escapes."""
MAX_REPEAT = 1000
_MAX_DEPTH = 50
"""Levels of groups."""

_ASCII = frozenset(map(chr, range(128)))
_DIGIT, _WORD = frozenset(string.digits), frozenset(string.ascii_letters + string.digits + "_")
_SPACE = frozenset("\t\n\f\r ")
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_POSIX = {
    "alnum": frozenset(string.ascii_letters + string.digits), "alpha": frozenset(string.ascii_letters), "ascii": _ASCII,
    "blank": frozenset("\t "), "digit": _DIGIT, "lower": frozenset(string.ascii_lowercase), "space": _SPACE | {"\v"},
    "punct": frozenset(string.punctuation), "upper": frozenset(string.ascii_uppercase), "word": _WORD,
    "xdigit": frozenset(string.hexdigits), "cntrl": frozenset(map(chr, [*range(32), 127])),
    "graph": frozenset(map(chr, range(33, 127))), "print": frozenset(map(chr, range(32, 127))),
}  # fmt: skip
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}

_CHAR, _SPLIT, _JUMP, _SAVE, _ASSERT, _MATCH = range(6)
_Instruction = tuple[int, object, object]
_Emit = Callable[[list[_Instruction]], None]


class PatternError(ValueError):
    """Text that is no regular expression, or one that is too large; the message completes a sentence."""


class CharClass(msgspec.Struct, frozen=True):
    """The characters that one instruction matches."""

    ascii: frozenset[str]
    other: bool = False
    """Whether it matches characters outside ASCII."""


class Pattern:
    """A compiled regular expression."""

    def __init__(self, text: str, program: list[_Instruction], names: tuple[str, ...]) -> None:
        self.text = text
        self.names = names
        """Names of the groups by number; empty for groups without a name, and for group 0."""
        self._program = program

    @property
    def groups(self) -> int:
        """Number of groups, without the whole match."""
        return len(self.names) - 1

    def search(self, text: str) -> tuple[str, ...] | None:
        """Return the whole match and its groups (leftmost-first, as Go and Perl), or None. Absent groups are empty."""
        text = text[:MAX_TEXT]
        size = len(self._program)
        visited = bytearray(size * (len(text) + 1))
        for start in range(len(text) + 1):
            found = self._run(text, start, visited)
            if found is not None:
                pairs = zip(found[::2], found[1::2], strict=True)
                return tuple("" if begin < 0 or end < 0 else text[begin:end] for begin, end in pairs)
        return None

    def _run(self, text: str, start: int, visited: bytearray) -> list[int] | None:
        """Return the slots of the groups for a match at `start`.

        A pair of instruction and position that was visited did not lead to a match, whatever the start was.
        """
        program, size, length = self._program, len(self._program), len(text)
        slots = [-1] * (2 * len(self.names))
        stack: list[tuple[int, int]] = [(0, start)]
        while stack:
            at, position = stack.pop()
            if at < 0:
                slots[~at] = position
                continue
            while not visited[position * size + at]:
                visited[position * size + at] = 1
                code, one, two = program[at]
                if code == _CHAR:
                    if position == length or not _matches(one, text[position]):
                        break
                    position += 1
                    at += 1
                elif code == _SPLIT:
                    stack.append((two, position))  # type: ignore[arg-type]
                    at = one  # type: ignore[assignment]
                elif code == _JUMP:
                    at = one  # type: ignore[assignment]
                elif code == _SAVE:
                    slot: int = one  # type: ignore[assignment]
                    stack.append((~slot, slots[slot]))
                    slots[slot] = position
                    at += 1
                elif code == _ASSERT:
                    if not _holds(one, text, position):
                        break
                    at += 1
                else:
                    return slots
        return None


def _matches(desired: object, char: str) -> bool:
    assert isinstance(desired, CharClass)
    return char in desired.ascii if char < "\x80" else desired.other


def _holds(assertion: object, text: str, position: int) -> bool:
    if assertion in ("b", "B"):
        before = position > 0 and text[position - 1] in _WORD
        after = position < len(text) and text[position] in _WORD
        return (before != after) is (assertion == "b")
    if assertion == "^":
        return position == 0
    if assertion == "$":
        return position == len(text)
    if assertion == "m^":
        return position == 0 or text[position - 1] == "\n"
    return position == len(text) or text[position] == "\n"


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Compile a pattern. Raises PatternError."""
    if len(text) > MAX_PATTERN:
        raise PatternError(f"has {len(text)} characters; {MAX_PATTERN} are allowed")
    parser = _Parser(text)
    emit = parser.parse()
    program: list[_Instruction] = [(_SAVE, 0, None)]
    emit(program)
    program += [(_SAVE, 1, None), (_MATCH, None, None)]
    return Pattern(text, program, tuple(parser.names))


def _add(program: list[_Instruction], instruction: _Instruction) -> int:
    if len(program) >= MAX_INSTRUCTIONS:
        raise PatternError("is too large: repetitions such as {100} multiply its size")
    program.append(instruction)
    return len(program) - 1


def _emit_char(desired: CharClass) -> _Emit:
    return _emit_one((_CHAR, desired, None))


def _emit_one(instruction: _Instruction) -> _Emit:
    def emit(program: list[_Instruction]) -> None:
        _add(program, instruction)

    return emit


def _emit_assertion(kind: str) -> _Emit:
    return _emit_one((_ASSERT, kind, None))


def _emit_sequence(parts: list[_Emit]) -> _Emit:
    def emit(program: list[_Instruction]) -> None:
        for part in parts:
            part(program)

    return emit


def _emit_group(inner: _Emit, number: int) -> _Emit:
    def emit(program: list[_Instruction]) -> None:
        _add(program, (_SAVE, 2 * number, None))
        inner(program)
        _add(program, (_SAVE, 2 * number + 1, None))

    return emit


def _emit_choice(first: _Emit, second: _Emit) -> _Emit:
    def emit(program: list[_Instruction]) -> None:
        split = _add(program, (_SPLIT, None, None))
        first(program)
        jump = _add(program, (_JUMP, None, None))
        program[split] = (_SPLIT, split + 1, len(program))
        second(program)
        program[jump] = (_JUMP, len(program), None)

    return emit


def _emit_repeat(inner: _Emit, low: int, high: int | None, lazy: bool) -> _Emit:
    def split_to(program: list[_Instruction], at: int, inside: int, after: int) -> None:
        program[at] = (_SPLIT, after, inside) if lazy else (_SPLIT, inside, after)

    def emit(program: list[_Instruction]) -> None:
        for _ in range(low):
            before = len(program)
            inner(program)
            if len(program) == before:
                # What is empty is the same however often it is repeated, and does not count as instructions.
                break
        if high is None:
            split = _add(program, (_SPLIT, None, None))
            inner(program)
            _add(program, (_JUMP, split, None))
            split_to(program, split, split + 1, len(program))
            return
        splits = []
        for _ in range(high - low):
            splits.append(_add(program, (_SPLIT, None, None)))
            inner(program)
        for split in splits:
            split_to(program, split, split + 1, len(program))

    return emit


class _Parser:
    """Recursive descent over the syntax of RE2."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._flags = frozenset[str]()
        self.names = [""]

    def parse(self) -> _Emit:
        found = self._choice()
        if self._at < len(self._text):
            raise PatternError("has a ) without a (")
        return found

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, word: str) -> bool:
        if self._text.startswith(word, self._at):
            self._at += len(word)
            return True
        return False

    def _choice(self) -> _Emit:
        flags = self._flags
        found = self._sequence()
        alternatives = [found]
        while self._take("|"):
            alternatives.append(self._sequence())
        self._flags = flags
        found = alternatives.pop()
        while alternatives:
            found = _emit_choice(alternatives.pop(), found)
        return found

    def _sequence(self) -> _Emit:
        parts: list[_Emit] = []
        while (char := self._next()) and char not in "|)":
            atom = self._atom()
            if atom is not None:
                parts.append(self._repeated(atom))
        return _emit_sequence(parts)

    def _repeated(self, atom: _Emit) -> _Emit:
        bounds = self._bounds()
        if bounds is None:
            return atom
        lazy = self._take("?") is not ("U" in self._flags)
        if self._bounds() is not None:
            raise PatternError("repeats a repetition")
        return _emit_repeat(atom, *bounds, lazy)

    def _bounds(self) -> tuple[int, int | None] | None:
        for word, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(word):
                return bounds
        inside, end, _ = self._text[self._at + 1 :].partition("}")
        if self._next() != "{" or not end:
            return None
        low, comma, high = inside.partition(",")
        if not (low.isdecimal() and low.isascii()) or (high and not (high.isdecimal() and high.isascii())):
            return None
        self._at += len(inside) + 2
        if len(low) > 4 or len(high) > 4 or int(low) > MAX_REPEAT or int(high or 0) > MAX_REPEAT:
            raise PatternError(f"repeats more than {MAX_REPEAT} times")
        if high and int(high) < int(low):
            raise PatternError(f"has a repetition {{{inside}}} whose end is before its beginning")
        return int(low), (int(high) if high else None) if comma else int(low)

    def _atom(self) -> _Emit | None:
        """Return one atom, or None for flags such as (?i)."""
        char = self._next()
        self._at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return _emit_char(self._class())
        if char == ".":
            dot = _ASCII if "s" in self._flags else _ASCII - {"\n"}
            return _emit_char(CharClass(dot, True))
        if char in "^$":
            return _emit_assertion(("m" if "m" in self._flags else "") + char)
        if char == "\\":
            return self._escaped_atom()
        if char in "*+?":
            raise PatternError(f"has a {char} that repeats nothing")
        return self._literal(char)

    def _literal(self, char: str) -> _Emit:
        return _emit_char(self._folded(frozenset(char)))

    def _folded(self, chars: frozenset[str], other: bool = False) -> CharClass:
        if "i" in self._flags:
            chars = chars | {char.lower() for char in chars} | {char.upper() for char in chars}
        return CharClass(chars & _ASCII, other or bool(chars - _ASCII))

    def _group(self) -> _Emit | None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"nests more than {_MAX_DEPTH} groups")
        number = 0
        flags = self._flags
        look_behind = self._text.startswith(("?<=", "?<!"), self._at)
        if self._take("?P<") or (not look_behind and self._take("?<")):
            name, end, _ = self._text[self._at :].partition(">")
            if not end or not name.isidentifier() or not name.isascii() or name in self.names:
                raise PatternError(f"has a group with an invalid name: {name[:20]!a}")
            self._at += len(name) + 1
            number = len(self.names)
            self.names.append(name)
        elif self._take("?"):
            if self._flags_end() == ")":
                self._depth -= 1
                return None
        else:
            number = len(self.names)
            self.names.append("")
        inner = self._choice()
        if not self._take(")"):
            raise PatternError("has a ( without a )")
        self._flags = flags
        self._depth -= 1
        return _emit_group(inner, number) if number else inner

    def _flags_end(self) -> str:
        """Read flags such as `i` or `-s`, and return what ends them: `:` or `)`."""
        on, flags = True, set(self._flags)
        while (char := self._next()) and char in "imsU-":
            self._at += 1
            if char == "-":
                on = False
            elif on:
                flags.add(char)
            else:
                flags.discard(char)
        if char not in (":", ")"):
            raise PatternError("has a (? that is not supported: there is no look-around in linear time")
        self._at += 1
        self._flags = frozenset(flags)
        return char

    def _escaped_atom(self) -> _Emit:
        char = self._next()
        if char in ("A", "z", "b", "B"):
            self._at += 1
            return _emit_assertion({"A": "^", "z": "$"}.get(char, char))
        return _emit_char(self._escaped())

    def _escaped(self) -> CharClass:
        """Return the characters of an escape; the backslash is taken already."""
        char = self._next()
        self._at += 1
        if char.lower() in _CLASSES and char:
            chars = _CLASSES[char.lower()]
            return CharClass(chars) if char.islower() else CharClass(_ASCII - chars, True)
        if char == "x":
            digits = self._text[self._at : self._at + 2]
            if len(digits) != 2 or not set(digits) <= set(string.hexdigits):
                raise PatternError("has a \\x without two hexadecimal digits")
            self._at += 2
            return self._folded(frozenset(chr(int(digits, 16))))
        if char in _ESCAPES:
            return CharClass(frozenset(_ESCAPES[char]))
        if not char or char.isalnum():
            raise PatternError(f"has an escape \\{char} that is not supported")
        return self._folded(frozenset(char))

    def _class(self) -> CharClass:
        negated = self._take("^")
        chars, other, first = set[str](), False, True
        while first or self._next() != "]":
            if not self._next():
                raise PatternError("has a [ without a ]")
            if self._take("[:"):
                name, end, _ = self._text[self._at :].partition(":]")
                negative = name.startswith("^")
                if not end or name.lstrip("^") not in _POSIX:
                    raise PatternError(f"has an unknown class [:{name[:20]}:]")
                found = _POSIX[name.lstrip("^")]
                self._at += len(name) + 2
                chars |= _ASCII - found if negative else found
                other = other or negative
            else:
                low = self._class_char()
                after = self._text[self._at + 1 : self._at + 2]
                if isinstance(low, str) and self._next() == "-" and after not in ("]", ""):
                    self._at += 1
                    high = self._class_char()
                    if not isinstance(high, str) or high < low:
                        raise PatternError("has a class with an invalid range")
                    chars |= {chr(code) for code in range(ord(low), min(ord(high), 127) + 1)}
                    other = other or high > "\x7f"
                else:
                    chars |= {low} if isinstance(low, str) else low.ascii
                    other = other or (not isinstance(low, str) and low.other)
            first = False
        self._at += 1
        made = self._folded(frozenset(chars), other)
        return CharClass(_ASCII - made.ascii, not made.other) if negated else made

    def _class_char(self) -> str | CharClass:
        char = self._next()
        self._at += 1
        if char != "\\":
            return char
        found = self._escaped()
        return next(iter(found.ascii)) if len(found.ascii) == 1 and not found.other else found
