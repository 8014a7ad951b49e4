"""The only package that imports megatron-core.

Importing it installs the CPU import hook first, then megatron-core's patches.

Raises:
    ConfigError: megatron-core is not installed.
"""

import warnings

from relax_actors.engines.megatron import cpu_import_hook, installation

installation.require()

ON_CPU = cpu_import_hook.install()
"""Whether megatron-core computes on the CPU because CUDA is not available."""

# megatron-core warns of its own settings, of its replacements for TransformerEngine, and of deprecated torch functions.
warnings.filterwarnings("ignore", module=r"megatron\.core(\.|$)")
warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r".torch\.distributed\..* is deprecated", category=FutureWarning)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401 imports everything that this package uses, without warnings

    from relax_actors.engines.megatron.mcore import patches

    patches.apply(on_cpu=ON_CPU)
