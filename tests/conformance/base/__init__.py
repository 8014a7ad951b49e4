"""Suites of tests, one for each protocol; each implementation subclasses its suite."""
