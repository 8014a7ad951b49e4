"""Training engine, scoring engine and model code on PyTorch, shared by all engines that compute with it."""
