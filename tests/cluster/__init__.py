"""A cluster of real Kubernetes programs on this machine, whose network is Narthex as `deploy/` installs it.

`make cluster` runs it. The tests of this folder check what can be checked without the programs.
"""
