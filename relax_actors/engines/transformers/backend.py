"""The backend `rollout.backend = "transformers"`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from relax_actors.config import Config
from relax_actors.engines.protocols import InferenceEngine
from relax_actors.engines.protocols.backend import InferenceBackend
from relax_actors.engines.torch.architectures import check_architecture
from relax_actors.runtime import Context


class TransformersBackend(InferenceBackend):
    """Generation in the actor's process with transformers; see `InferenceBackend`."""

    has_adapters = True
    has_entropies = True
    repeats_samples = True

    def build(self, context: Context) -> InferenceEngine:
        """Load the model."""
        from relax_actors.engines.torch.adapter import run_weights  # noqa: PLC0415 only a process that generates needs torch
        from relax_actors.engines.torch.devices import device_of  # noqa: PLC0415
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415
        from relax_actors.engines.transformers.engine import TransformersEngine  # noqa: PLC0415

        config = context.config
        configure_torch(config.run)
        device = device_of(config.rollout.device)
        joins = config.environment is not None or config.gateway is not None
        kept_bytes = config.rollout.turn_cache_mib << 20 if joins else None
        return TransformersEngine(
            config.model_path,
            device,
            records_experts=config.trainer.router_replay,
            records_entropies=config.record.entropy,
            kept_bytes=kept_bytes,
            weights=partial(run_weights, config),
        )

    def build_frozen(self, context: Context, model: Path, device: str) -> InferenceEngine:
        """Load a frozen model; see `InferenceBackend`."""
        from relax_actors.engines.torch.devices import device_of  # noqa: PLC0415 as in `build`
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415
        from relax_actors.engines.transformers.engine import TransformersEngine  # noqa: PLC0415

        configure_torch(context.config.run)
        engine = TransformersEngine(model, device_of(device))
        engine.freeze(model)
        return engine

    def check(self, config: Config, model: Path) -> Iterator[str]:
        """Refuse models that transformers cannot build."""
        check_architecture(config, model)
        yield from ()

    def check_frozen(self, config: Config, model: Path, setting: str) -> Iterator[str]:
        """Refuse models that transformers cannot build."""
        del setting
        yield from self.check(config, model)
