"""nft's language: rules as text that `nft -f` reads, and rules from the text of `nft list ruleset`.

Printing raises `Unprintable` rather than write a word that is not of the shape its place asks for, so nothing that a
stranger named can become syntax. Parsing never fails on rules of others: what it does not know becomes `Unknown`.
"""

from narthex.netfilter.nft.parse import parse
from narthex.netfilter.nft.print import NAME_LIMIT, chain_text, script, set_text

__all__ = ["NAME_LIMIT", "chain_text", "parse", "script", "set_text"]
