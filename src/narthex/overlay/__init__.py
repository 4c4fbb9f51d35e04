"""The overlay: routes between nodes' pod networks, compatible with flannel. Pure."""
