"""Reward `code_tests`: a model's programs run against hidden tests.

- `reward`: takes the program out of a completion, runs it in sandboxes, and counts passed tests.
- `exchange`, `program`, `tests`: what runs in the sandboxes, with the standard library of Python 3.9 or newer alone.
  Calls that tests make to the program pass from one sandbox to another as JSON.
"""
