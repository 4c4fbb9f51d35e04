"""The nftables backend: constant rules, all state in maps. Pure."""
