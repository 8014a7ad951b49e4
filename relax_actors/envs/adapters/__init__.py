"""Environments of other projects; each imports its package on first use."""
