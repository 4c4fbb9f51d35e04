"""Interfaces of the Linux kernel: netlink families, namespaces, links, kernel settings, and processes."""
