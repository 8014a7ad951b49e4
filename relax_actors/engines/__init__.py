"""Engines that generate and train; the only packages that import transformers, sglang or megatron."""
