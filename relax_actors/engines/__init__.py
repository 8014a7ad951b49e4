"""Engines that generate, score and train; only their packages import transformers, sglang or megatron."""
