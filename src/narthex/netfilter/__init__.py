"""Netfilter rules as typed data: nodes, printers, parsers, netlink codecs, and a walk of packets through them."""
