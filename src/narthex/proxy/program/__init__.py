"""The node proxy: the loop from events to kernel state, and what it shows of itself."""
