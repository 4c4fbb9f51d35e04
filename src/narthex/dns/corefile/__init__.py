"""Corefile text to typed server blocks, and back. Pure."""
