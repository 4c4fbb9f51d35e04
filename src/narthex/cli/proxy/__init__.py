"""`narthex proxy` and its flags."""
