"""The relay of userspace mode."""
