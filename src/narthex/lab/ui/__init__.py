"""The web page of a cluster, on this machine only.

`picture` computes what to draw, `counts` reads connection counts, `path` traces a packet, `board` keeps the current state for all
browsers, `pages` answers them, and `serve` runs it.
"""
