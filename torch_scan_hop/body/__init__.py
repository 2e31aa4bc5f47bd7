"""The body graph, what is said about it, and what is derived from it and kept."""
