"""Llama 2 and 3."""

from relax_actors.engines.megatron.families.spec import TextFamily

LLAMA = TextFamily(model_type="llama", has_windows=False)
