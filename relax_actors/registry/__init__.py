"""Lookup of what the configuration names: registries, entry points and dotted paths."""
