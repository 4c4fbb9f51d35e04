"""What changes the machine: one Target per kernel tool, namespaces, links. Effects, outwards."""
