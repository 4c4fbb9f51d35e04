"""The masquerading rules in the kernel, by iptables or nftables, in the current network namespace."""

from __future__ import annotations

from narthex.linux.iptables_variants import plain_command
from narthex.linux.libnftables import NftError, NftMissingError, run_nft
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.model import IPFamily
from narthex.netfilter.ast import Table
from narthex.netfilter.nft.parse import parse_ruleset
from narthex.netfilter.nft.print import nft_script
from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.netfilter.xtables.parse import parse_save_text
from narthex.overlay.masquerade import PEERS, TABLES, MasqueradeRules, iptables_changes

_LOCK_SECONDS = "5"
_SECONDS = 60.0


class MasqueradeError(RuntimeError):
    """The kernel or its tool refused the masquerading rules."""


class MasqueradeWriter:
    """Keeps the rules in one of the two tools and removes them from the other."""

    def __init__(self, *, nftables: bool) -> None:
        self.nftables = nftables
        self._other_is_clean: set[object] = set()

    def reconcile(self, rules: MasqueradeRules) -> bool:
        """Establish the rules of a family; return True if anything was changed. Raises MasqueradeError."""
        needed = any(rules.chains().values())
        changed = self._reconcile_nftables(rules) if self.nftables else self._reconcile_iptables(rules, needed=needed)
        if rules.family not in self._other_is_clean:
            # Leftovers of an earlier run or of flannel in the other tool would masquerade as well.
            nothing = MasqueradeRules(rules.family, "", "", masquerade=False, forward=False)
            changed |= (
                self._reconcile_iptables(nothing, needed=False) if self.nftables else self._reconcile_nftables(nothing)
            )
            self._other_is_clean.add(rules.family)
        return changed

    def reconcile_to_peers(self, rules: MasqueradeRules) -> bool:
        """Establish the table in front of masquerading rules of either tool; return True if anything was changed.

        Raises MasqueradeError if the machine has no nftables. Traffic is masqueraded without it as well.
        """
        return _replace(rules.family, PEERS, rules.to_peers)

    def _reconcile_iptables(self, rules: MasqueradeRules, *, needed: bool) -> bool:
        command = plain_command(rules.family)
        try:
            text = "".join(run([f"{command}-save", "-t", table], timeout=_SECONDS) for table in ("nat", "filter"))
            script = iptables_changes(rules, parse_save_text(text, rules.family))
            if script:
                run([f"{command}-restore", "--noflush", "--wait", _LOCK_SECONDS], stdin=script, timeout=_SECONDS)
        except FileNotFoundError:
            if not needed:
                return False
            raise MasqueradeError(
                f"{command} is not installed: install it, or set EnableNFTables in net-conf.json"
            ) from None
        except (CommandError, TimeoutExpired, SaveTextError) as error:
            if not needed:
                return False
            raise MasqueradeError(f"masquerading rules of {rules.family.label}: {error}") from error
        return bool(script)

    def _reconcile_nftables(self, rules: MasqueradeRules) -> bool:
        return _replace(rules.family, TABLES[rules.family], rules.table())


def _replace(family: IPFamily, name: str, desired: Table | None) -> bool:
    """Replace a table unless it is the desired one; return True if it was changed. Raises MasqueradeError."""
    where = f"{family.nft} {name}"
    try:
        have = _listed(where)
        if have == desired:
            return False
        remove = f"table {where}\ndelete table {where}\n"
        run_nft(remove + (nft_script(desired) if desired is not None else ""))
    except NftMissingError as error:
        if desired is None:
            return False
        raise MasqueradeError(f"masquerading rules of {family.label}: {error}") from error
    except (NftError, OSError, ValueError) as error:
        raise MasqueradeError(f"masquerading rules of {family.label}, table {where}: {error}") from error
    return True


def _listed(where: str) -> Table | None:
    try:
        text = run_nft(f"list table {where}")
    except NftError:
        return None
    return next(iter(parse_ruleset(text).tables), None)
