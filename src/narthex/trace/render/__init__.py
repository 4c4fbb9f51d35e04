"""A path as text, SVG, HTML, or a graph. Pure."""
