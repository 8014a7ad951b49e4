"""Engines that generate, score and train; only their packages import transformers, sglang or megatron."""

from relax_actors.torchaudio_extension import permit_import

permit_import()  # before transformers, which imports torchaudio where it is installed
