"""iptables rules as text: a printer for iptables-restore, and parsers for iptables-save and `iptables -L`."""

from narthex.netfilter.xtables.lexer import SaveTextError
from narthex.netfilter.xtables.parse import parse, parse_rules
from narthex.netfilter.xtables.print import save_text
from narthex.netfilter.xtables.values import kernel_probability

__all__ = ["SaveTextError", "kernel_probability", "parse", "parse_rules", "save_text"]
