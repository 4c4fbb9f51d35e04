"""Targets: each carries the changes of one backend to the kernel, and reads the rules back."""
