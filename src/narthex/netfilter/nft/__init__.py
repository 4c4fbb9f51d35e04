"""The language of nft: a printer for `nft -f`, and a parser for `nft list ruleset`.

The printer raises `Unprintable` for a word that does not have the expected form, so no foreign name can become syntax. The
parser never fails on foreign rules: unknown parts become `Unknown`.
"""

from narthex.netfilter.nft.parse import parse
from narthex.netfilter.nft.print import NAME_LIMIT, chain_text, script, set_text

__all__ = ["NAME_LIMIT", "chain_text", "parse", "script", "set_text"]
