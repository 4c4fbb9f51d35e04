"""The overlay's access to the kernel: links, entries, rules, notifications, and files."""
