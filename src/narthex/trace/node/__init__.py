"""Parsers of what a node's tools print: single files and bundles become a `NodeView`. Pure."""
