"""The effects of the CNI plugins: reservations, records, namespaces, elements of rules. Loaded in milliseconds."""
