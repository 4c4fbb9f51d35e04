"""The overlay program."""
