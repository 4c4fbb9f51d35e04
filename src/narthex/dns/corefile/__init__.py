"""Parses Corefiles into typed settings. Pure."""
