"""An API server for tests."""
