"""Sends tensors between the memory of two torch processes over torch.distributed (gloo), without files."""
