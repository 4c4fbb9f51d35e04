"""The web page of a cluster, on this machine only.

`board` keeps the current state for all browsers, `path` traces a packet, and `serve` answers the browsers.
"""
