"""Programs: each wires sources, state, plan, backends and host together."""
