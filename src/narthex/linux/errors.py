"""Errors of changes to the kernel."""


class ApplyError(RuntimeError):
    """The kernel or its tool refused a change."""
