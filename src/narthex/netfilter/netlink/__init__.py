"""The binary forms that netlink messages carry: set elements, rules, connections, and virtual servers. Pure."""
