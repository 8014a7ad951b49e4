"""All that imports megatron-core. Whoever imports a module of this package has it behind the hook, and mended.

Raises:
    ConfigError: megatron-core is not installed.
"""

import warnings

from relax_actors.engines.megatron import hook, presence

presence.require()

ON_CPU = hook.install()
"""Whether megatron-core was fitted to a machine without CUDA."""

# Of its own settings, of what it takes in place of TransformerEngine, and of torch's newer names for what it calls.
warnings.filterwarnings("ignore", module=r"megatron\.core(\.|$)")
warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r".torch\.distributed\..* is deprecated", category=FutureWarning)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401 what others of this package import comes with these

    from relax_actors.engines.megatron.mcore import fixes

    fixes.apply(on_cpu=ON_CPU)
