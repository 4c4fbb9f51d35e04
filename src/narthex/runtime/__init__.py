"""Shared by all long-running programs: reconcile loop, configuration, logging, HTTP, status ports, and signals."""
