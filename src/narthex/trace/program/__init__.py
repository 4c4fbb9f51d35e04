"""Paths over what nodes really have: trace, check, top, diff and bundles. Wiring only."""
