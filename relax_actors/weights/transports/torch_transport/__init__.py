"""Sends tensors between two processes over torch.distributed (gloo), without files."""
