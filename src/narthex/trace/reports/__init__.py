"""Comparisons: objects with rules, node with node, mode with mode. Pure."""
