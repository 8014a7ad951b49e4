"""Inference engine: a transformers model in the actor's process."""
