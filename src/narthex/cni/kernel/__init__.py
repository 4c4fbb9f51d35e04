"""Effects of the CNI plugins: reservations, records, namespaces, and set elements. Fast to import."""
