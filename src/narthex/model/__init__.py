"""Kubernetes objects, addresses, and packets as immutable values. Imports nothing else of Narthex."""
