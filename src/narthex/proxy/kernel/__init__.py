"""The kernel side of the proxy: Targets, which carry changes to a kernel and read rules back, and clean-up."""
