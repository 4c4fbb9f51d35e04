"""The path of a packet from node to node. Pure."""
