"""Exact sets of packets, and the walk of such sets through rules."""
