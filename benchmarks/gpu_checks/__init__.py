"""Checks of what computes on a GPU; `gpu_check.py` runs them."""
