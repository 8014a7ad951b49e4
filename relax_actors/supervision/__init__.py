"""Supervision: child specs as data, decisions as pure functions, and one interpreter that starts and kills processes."""
