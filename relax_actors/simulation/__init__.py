"""Simulated engines, which take the time of real ones on simulated devices, without torch."""
