"""iptables rules as text: a printer for iptables-restore, and parsers for iptables-save and `iptables -L`."""
