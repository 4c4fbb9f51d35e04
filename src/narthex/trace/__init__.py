"""Explanations: the path of a packet through rules, routes, and nodes, and comparisons of nodes, plans, and modes."""
