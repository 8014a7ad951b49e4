"""Supervision: child specs as data, decisions as pure functions, one interpreter that starts and kills processes."""
