"""Weights from the trainer's memory to that of other torch processes, over torch.distributed; no files."""
