"""Reading the inputs of trace, check, top, diff, and migrate, taking bundles, and probing the kernel."""
