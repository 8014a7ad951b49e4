"""GPUs of a machine: which there are, and which actor computes on which."""
