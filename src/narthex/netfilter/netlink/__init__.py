"""Payloads of netlink messages about netfilter: set elements, rules, connections, and virtual servers."""
