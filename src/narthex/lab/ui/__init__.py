"""The picture of a cluster: a web page on this machine alone.

`picture` says what there is to draw, `counts` how many connections there were, `path` which way a packet takes; `board` holds
the present of it for whoever watches, `pages` answers a browser, `serve` runs all of it.
"""
