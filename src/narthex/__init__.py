"""Narthex: the Kubernetes Service network in Python."""

__version__ = "0.1.0"
