"""iptables rules as text: `save_text` prints what iptables-restore reads, `parse` reads what iptables-save prints."""

from narthex.netfilter.xtables.parse import parse, parse_rules
from narthex.netfilter.xtables.print import save_text
from narthex.netfilter.xtables.values import kernel_probability
from narthex.netfilter.xtables.words import SaveTextError

__all__ = ["SaveTextError", "kernel_probability", "parse", "parse_rules", "save_text"]
