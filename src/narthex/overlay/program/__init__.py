"""The overlay's program."""
