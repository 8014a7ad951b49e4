"""Comparisons with the code of TRL 1.16 (`pip install relax-actors[parity]`), which is read, not copied."""
