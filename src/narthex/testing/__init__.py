"""Public tools for tests: builders, strategies, and the scenario runner."""
