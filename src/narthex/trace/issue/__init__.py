"""Text for an issue tracker: the parts of bundles that one packet touches, written so that a trace can read them back."""
