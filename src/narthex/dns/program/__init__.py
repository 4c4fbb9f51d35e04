"""`narthex dns`: names of Services and pods, and of the world by others."""
