"""`ipset list`: sets as people read them."""

from __future__ import annotations

from collections.abc import Mapping

from narthex.netfilter.ipset import sets as ipset
from narthex.netfilter.ipset.sets import IpSet

_HEADS = ("Revision:", "Size in memory:", "References:", "Number of entries:")


class Lists:
    """Takes a text line by line."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._name = ""
        self._members = False

    def take(self, line: str) -> bool:
        """Whether the line belongs to a list."""
        if line.startswith("Name: "):
            self._name, self._members = line[6:].strip(), False
            return True
        if not self._name:
            return False
        if line.startswith("Type: "):
            self._lines.append(f"create {self._name} {line[6:].strip()} ")
        elif line.startswith("Header: ") and self._lines:
            self._lines[-1] += line[8:].strip()
        elif line == "Members:":
            self._members = True
        elif line.startswith(_HEADS):
            pass
        elif self._members and line[0].isalnum() and ("." in line or ":" in line or "," in line or line.isdigit()):
            self._lines.append(f"add {self._name} {line}")
        else:
            self._name = ""
            return False
        return True

    def sets(self) -> Mapping[str, IpSet]:
        """What was listed."""
        return ipset.parse("\n".join(self._lines))
