"""The overlay's masquerading in the kernel: iptables or nftables, read, compared and mended, in the present namespace."""

from __future__ import annotations

from narthex.linux.errors import ApplyError
from narthex.linux.iptables_variants import plain_command
from narthex.linux.libnftables import NftError, NftMissing, run_nft
from narthex.linux.run import CommandError, TimeoutExpired, run
from narthex.netfilter import nft, xtables
from narthex.netfilter.ast import Table
from narthex.overlay.masquerade import TABLES, MasqueradeRules, iptables_changes

_LOCK_SECONDS = "5"
_SECONDS = 60.0


class MasqueradeWriter:
    """Keeps rules in one of the two tools, and the other free of them."""

    def __init__(self, *, nftables: bool) -> None:
        self.nftables = nftables
        self._other_is_clean: set[object] = set()

    def keep(self, wish: MasqueradeRules) -> bool:
        """Make the rules of a family what they are wished to be; whether anything was to be done. Raises ApplyError."""
        needed = any(wish.chains().values())
        changed = self._keep_nftables(wish) if self.nftables else self._keep_iptables(wish, needed=needed)
        if wish.family not in self._other_is_clean:
            # What an earlier run, or flannel, left in the other tool would masquerade as well.
            nothing = MasqueradeRules(wish.family, "", "", masquerade=False, forward=False)
            changed |= self._keep_iptables(nothing, needed=False) if self.nftables else self._keep_nftables(nothing)
            self._other_is_clean.add(wish.family)
        return changed

    def _keep_iptables(self, wish: MasqueradeRules, *, needed: bool) -> bool:
        command = plain_command(wish.family)
        try:
            text = "".join(run([f"{command}-save", "-t", table], timeout=_SECONDS) for table in ("nat", "filter"))
            script = iptables_changes(wish, xtables.parse(text, wish.family))
            if script:
                run([f"{command}-restore", "--noflush", "--wait", _LOCK_SECONDS], stdin=script, timeout=_SECONDS)
        except FileNotFoundError:
            if not needed:
                return False
            raise ApplyError(
                f"{command} is not installed: install it, or set EnableNFTables in net-conf.json"
            ) from None
        except (CommandError, TimeoutExpired, xtables.SaveTextError) as error:
            if not needed:
                return False
            raise ApplyError(f"masquerading rules of {wish.family.label}: {error}") from error
        return bool(script)

    def _keep_nftables(self, wish: MasqueradeRules) -> bool:
        where = f"{wish.family.nft} {TABLES[wish.family]}"
        wanted = wish.table()
        try:
            have = _listed(where)
            if have == wanted:
                return False
            remove = f"table {where}\ndelete table {where}\n"
            run_nft(remove + (nft.script(wanted) if wanted is not None else ""))
        except NftMissing as error:
            if wanted is None:
                return False
            raise ApplyError(f"masquerading rules of {wish.family.label}: {error}") from error
        except (NftError, OSError, ValueError) as error:
            raise ApplyError(f"masquerading rules of {wish.family.label}, table {where}: {error}") from error
        return True


def _listed(where: str) -> Table | None:
    try:
        text = run_nft(f"list table {where}")
    except NftError:
        return None
    return next(iter(nft.parse(text).tables), None)
