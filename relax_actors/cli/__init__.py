"""The command `relax`."""
