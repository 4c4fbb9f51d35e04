"""The iptables Target: one iptables-restore per change, in one network namespace, for one family."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import closing, contextmanager
from pathlib import Path

from narthex.linux.failpoints import IPTABLES_GIVEN, IPTABLES_RESTORED, failpoint
from narthex.linux.iptables_variants import default_variant
from narthex.linux.namespaces import in_namespace
from narthex.linux.netlink import DumpInterrupted
from narthex.linux.nfnetlink import FAMILY_NUMBERS, NfNetlink
from narthex.linux.run import CommandError, TimeoutExpired, feed, run
from narthex.model import IPFamily
from narthex.netfilter.ast import TouchedPart, Unprintable
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.proxy.backends.base import ApplyError, Target
from narthex.proxy.backends.iptables import names
from narthex.proxy.backends.iptables.frame import ROUTE_LOCALNET
from narthex.proxy.backends.iptables.rules import Sysctl, XtablesChanges, XtablesRules
from narthex.proxy.backends.iptables.script import COMMIT, KernelChains, find, needs_look, restore_blocks, written_again
from narthex.runtime.logs import LOGGER

_LOCK_SECONDS = "5"
"""How long to wait for another program that holds the xtables lock."""

_MOST_SECONDS = 1800.0
"""Timeout of one program. With a limit that a large load cannot meet, the load would start over forever."""

_LINE = re.compile(r"\bline:?\s+(\d+)", re.IGNORECASE)

PROC_SYS = Path("/proc/sys")


class IptablesTarget(Target[XtablesRules, XtablesChanges]):
    """Writes to the tables nat, filter, and mangle of one namespace.

    The system's default variant of iptables is used (nf_tables or legacy); `legacy` selects the old one. The two do not
    see each other's rules, so a node should use the same as other programs. `owner` says which chains are ours: other
    modes use iptables for a part of their work, too.
    """

    def __init__(
        self,
        family: IPFamily,
        namespace: str | None = None,
        legacy: bool = False,
        owner: names.ChainOwnership = names.IPTABLES_CHAINS,
    ) -> None:
        self._family = family
        self._owner = owner
        self._namespace = namespace
        self._command = ("iptables" if family is IPFamily.IPV4 else "ip6tables") + ("-legacy" if legacy else "")
        self._in_pieces = not legacy and default_variant(family) == "nft"
        self._last_read: tuple[int, KernelChains] | None = None
        """The generation of the ruleset before the last reading, and the part of it that changes depend on."""
        self._guarded = False
        """The last changes included KUBE-FIREWALL, so a shared one counts as ours."""
        self._refused: set[Sysctl] = set()
        """Settings that cannot be made here, such as in a container with a read-only /proc/sys. The rules work without."""

    def read(self) -> XtablesRules | None:
        """Return our rules in the kernel. Raises ApplyError if they cannot be read."""
        generation = self._generation()
        found = self._found()
        self._last_read = None if generation is None else (generation, found.without_own())
        return found.rules(self._guarded, self._in_force())

    def counters(self, table: str) -> str:
        """Return all rules of a table with their counters, as iptables-save prints them. Raises ApplyError."""
        return self._run([f"{self._command}-save", "--counters", "-t", table])

    def apply(self, changes: XtablesChanges) -> None:
        """Write the changes, all or nothing in each table, unless many changes are split. Raises ApplyError."""
        last, self._last_read = self._last_read, None
        found = None
        if needs_look(changes):
            # A replacement needs the names of all chains of ours.
            is_known = last is not None and not changes.replace and last[0] == self._generation()
            found = last[1] if last is not None and is_known else self._found()
        if changes.replace or names.FIREWALL in changes.written.get("filter", {}):
            self._guarded = names.FIREWALL in changes.written.get("filter", {})
        elif names.FIREWALL in changes.removed.get("filter", ()):
            self._guarded = False
        try:
            self._restore(lambda: restore_blocks(changes, found, in_pieces=self._in_pieces))
        except Unprintable as error:
            raise ApplyError(f"iptables rules could not be written down: {error}") from error
        # Only now: route_localnet without its guard would let neighbours reach this node's loopback.
        for path, value in changes.sysctls:
            self._set(path, value)

    def lacking(self, rules: XtablesRules, touched: Set[TouchedPart]) -> Set[TouchedPart]:
        """Return the touched chains of ours that have too few rules. On nf_tables, the kernel counts them."""
        if not self._in_pieces:
            return frozenset()
        desired = {
            part: len(rules.chains[part.table].get(part.chain, ())) for part in touched if part.table in rules.chains
        }
        number = int(FAMILY_NUMBERS[self._family.value])
        try:
            with closing(NfNetlink(self._namespace)) as link:
                return {part for part, count in desired.items() if link.rule_count(number, *part[:2]) < count}
        except (OSError, DumpInterrupted):
            return frozenset()

    def damage(self, rules: XtablesRules, touched: Set[TouchedPart] | None) -> XtablesChanges | None:
        """Return changes that write the touched chains again, if no others were touched.

        This is quicker than reading the rules. A jump, or a chain that the rules do not have, needs a reading.
        """
        return written_again(rules, touched) if touched else None

    def clean(self) -> None:
        """Remove all chains of ours and the jumps to them. Chains that rules of others use stay."""
        self.apply(XtablesChanges(family=self._family, replace=True, jumps={}))

    def _found(self) -> KernelChains:
        # All tables at once: on nf_tables, the tool reads all rules for each run, also with `-t`; the legacy one would make
        # a table that it is asked for.
        text = self._run([f"{self._command}-save"])
        try:
            return find(text, self._family, self._owner)
        except SaveTextError as error:
            raise ApplyError(f"{self._command}-save printed what cannot be read: {error}") from error

    def _generation(self) -> int | None:
        """Return the number of transactions of nf_tables, which every change raises; None if the kernel does not tell."""
        if not self._in_pieces:
            return None
        try:
            with closing(NfNetlink(self._namespace)) as link:
                return link.generation()
        except OSError:
            return None

    def _restore(self, script: Callable[[], Iterator[str]]) -> None:
        """Feed a script to the tool, in blocks. It is made again for the message of an error."""
        blocks = script()
        first = next(blocks, "")
        if not first:
            return

        def noted() -> Iterator[str]:
            """Yield the blocks; visit a failpoint after each COMMIT."""
            for block in itertools.chain((first,), blocks):
                yield block
                if block == COMMIT:
                    failpoint(IPTABLES_GIVEN)

        argv = [f"{self._command}-restore", "--noflush", "--wait", _LOCK_SECONDS]
        try:
            with _errors_named(argv):
                feed(argv, noted(), namespace=self._namespace, timeout=_MOST_SECONDS)
        except ApplyError as error:
            raise ApplyError(f"{error}{_quoted_line(script(), str(error))}") from error
        failpoint(IPTABLES_RESTORED)

    def _run(self, argv: list[str]) -> str:
        with _errors_named(argv):
            return run(argv, namespace=self._namespace, timeout=_MOST_SECONDS)

    def _in_force(self) -> tuple[Sysctl, ...]:
        """Return the settings that are made. One that cannot be made is no difference to repair, but is tried again."""
        if self._family is not IPFamily.IPV4:
            return ()
        if ROUTE_LOCALNET in self._refused:
            self._set(*ROUTE_LOCALNET)
            return (ROUTE_LOCALNET,)
        path, value = ROUTE_LOCALNET
        try:
            with in_namespace(self._namespace):
                return (ROUTE_LOCALNET,) if (PROC_SYS / path).read_text().strip() == value else ()
        except OSError:
            return ()

    def _set(self, path: str, value: str) -> None:
        """Make a setting. Failures are logged once: only node ports on 127.0.0.1 need it, and all else must go on."""
        setting = PROC_SYS / path
        try:
            with in_namespace(self._namespace):
                if setting.read_text().strip() != value:
                    setting.write_text(value)
        except OSError as error:
            if (path, value) not in self._refused:
                LOGGER.warning(
                    "%s could not be set to %s (%s): node ports do not answer on 127.0.0.1; set it on the machine itself, "
                    "or ask for nothing (iptables.localhostNodePorts: false)",
                    path,
                    value,
                    error.strerror or error,
                )
            self._refused.add((path, value))
        else:
            if (path, value) in self._refused:
                LOGGER.info("set %s to %s, which was refused before", path, value)
            self._refused.discard((path, value))


@contextmanager
def _errors_named(argv: list[str]) -> Iterator[None]:
    """Convert errors of a program to ApplyError."""
    try:
        yield
    except FileNotFoundError as error:
        raise ApplyError(f"{error.filename or argv[0]} is not there: is iptables installed?") from error
    except (CommandError, TimeoutExpired) as error:
        raise ApplyError(str(error)) from error


def _quoted_line(script: Iterable[str], said: str) -> str:
    """Return the line of the input that the tool's message refers to."""
    number = _LINE.search(said)
    if number is None or int(number[1]) < 1:
        return ""
    lines = (line for block in script for line in block.splitlines())
    line = next(itertools.islice(lines, int(number[1]) - 1, None), None)
    return "" if line is None else f"\n  line {number[1]} of the input: {line}"
