"""Traces: what the plan means (`evaluate`), and how a way is told to people (`explain`). Pure."""
