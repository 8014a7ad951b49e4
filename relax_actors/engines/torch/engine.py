"""Training in this process with torch: AdamW, clipped gradients, micro-batches by token budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from relax_actors.algorithms.losses import add_metrics, sft_loss
from relax_actors.algorithms.micro_batches import micro_batches
from relax_actors.algorithms.schedules import rate_of
from relax_actors.config.schema import Config
from relax_actors.engines.protocols.samples import TrainSample, by_row, lengths_of
from relax_actors.engines.protocols.training import StepResult
from relax_actors.engines.torch import replay_metrics as replayed
from relax_actors.engines.torch.background import meanwhile
from relax_actors.engines.torch.experts import Routers
from relax_actors.engines.torch.forward import Forward, MicroBatch, device_of
from relax_actors.engines.torch.frozen import freeze
from relax_actors.engines.torch.model import build, copy_into, has_weights, tensors_of
from relax_actors.engines.torch.objective import LossInputs, StepObjective, check_norm
from relax_actors.weights import files as weights
from relax_actors.weights.encoder import WeightEncoder
from relax_actors.weights.protocols import WeightPayload

OPTIMIZER = "optimizer.safetensors"
MODEL = "model.safetensors"
REFERENCE = "reference.safetensors"


class TorchEngine:
    """The reference engine: one process, one device.

    Args:
        config: the run's.
    """

    def __init__(self, config: Config) -> None:
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._config = config
        settings = config.trainer
        self._device = device_of(settings.device)
        self._dtype = getattr(torch, settings.precision)
        self._forward = Forward(self._device, self._dtype, config.rollout.temperature)
        self._model = self._forward.prepare(build(config.model_path, seed=config.run.seed, device=self._device))
        freeze(self._model, settings.freeze)
        self._routers = Routers(self._model) if settings.router_replay else None
        self._steps_to_compare = 0
        self._reference: PreTrainedModel | None = None
        self._encoder = WeightEncoder(self._published, keep_base=config.publishes_deltas)
        self._optimizer = self._new_optimizer(settings.learning_rate)
        # Of the step under way: its loss, and what each micro-batch measured.
        self._objective: StepObjective | None = None
        self._parts: list[dict[str, float]] = []

    def _new_optimizer(self, rate: float) -> torch.optim.Optimizer:
        settings = self._config.trainer
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        return torch.optim.AdamW(
            parameters,
            lr=rate,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=self._device.type in ("cpu", "cuda"),
        )

    def initialise(self, seed: int) -> None:
        """Take the folder's weights or random ones; see the protocol."""
        path = self._config.model_path
        if has_weights(path):
            copy_into(self._model, weights.load(sorted(path.glob("*.safetensors"))), str(path))
        else:
            copy_into(self._model, tensors_of(build(path, seed=seed)), "random start")
        self._encoder.invalidate()
        self._optimizer = self._new_optimizer(self._config.trainer.learning_rate)

    def warm_start(
        self, samples: Sequence[TrainSample], learning_rate: float, progress: Callable[[], None]
    ) -> StepResult:
        """One supervised step; see the protocol."""
        self._set_rate(learning_rate)
        tokens = sum(sample.trained for sample in samples)

        def loss_of(indices: list[int]) -> tuple[Tensor, dict[str, float]]:
            part = self._forward.part(samples, indices)
            logprobs = self._forward.logprobs(self._model, part, temperature=1.0)
            loss = sft_loss(logprobs, part.mask, tokens)
            return loss, {"loss": float(loss.detach())}

        self._add_gradients(lengths_of(samples), loss_of, progress)
        return StepResult(self._optimise())

    def finish_warm_start(self) -> None:
        """A fresh optimizer, and the reference; see the protocol."""
        self._optimizer = self._new_optimizer(self._config.trainer.learning_rate)
        if self._config.computes_reference:
            self._set_reference({name: tensor.clone() for name, tensor in tensors_of(self._model).items()})

    def _set_reference(self, tensors: dict[str, Tensor]) -> None:
        reference = self._forward.prepare(build(self._config.model_path, device=self._device))
        reference.requires_grad_(False)
        copy_into(reference, tensors, "reference")
        self._reference = reference

    def accumulate(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> None:
        """Add up the gradients of some sequences; see the protocol."""
        if self._objective is None:
            self._objective = StepObjective(self._config.algorithm)
        objective, forward = self._objective, self._forward
        samples = self._with_reference(samples, progress)

        def loss_of(indices: list[int]) -> tuple[Tensor, dict[str, float]]:
            part, chosen = forward.part(samples, indices), [samples[index] for index in indices]

            def padded(name: str) -> Tensor:
                return forward.padded([sample.masked(name) for sample in chosen], part.width)

            rollout = padded("logprobs")
            compared = self._without_replay(part, rollout)
            logprobs = forward.logprobs(self._model, part, routers=self._routers)
            if self._routers is not None:
                compared |= self._routers.choices.take()
            counts = torch.tensor([sample.sample_tokens or sample.trained for sample in chosen], device=self._device)
            inputs = LossInputs(
                logprobs,
                rollout,
                padded("advantages"),
                part.mask,
                counts,
                actor_fwd=padded("proximal_logprobs") if objective.needs_actor_fwd else None,
                reference=padded("reference_logprobs") if chosen[0].reference_logprobs is not None else None,
            )
            loss, measured = objective.loss(inputs)
            return loss, measured | compared

        self._add_gradients(lengths_of(samples), loss_of, progress)

    @torch.no_grad()
    def _without_replay(self, part: MicroBatch, rollout: Tensor) -> dict[str, float]:
        """What the first micro-batch of a step gives without replay, at some steps."""
        if self._routers is None or part.experts is None or self._parts or self._steps_to_compare:
            return {}
        self._steps_to_compare = replayed.EVERY
        logprobs = self._forward.logprobs(self._model, part, routers=self._routers, only_count=True)
        choices = replayed.unreplayed(self._routers.choices.take())
        return replayed.without_replay(logprobs, rollout, part.mask) | choices

    def discard(self) -> None:
        """Forget gradients; see the protocol."""
        self._objective = None
        self._parts.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, step: int, progress: Callable[[], None]) -> StepResult:
        """One optimizer step; see the protocol."""
        objective = self._objective
        if objective is None:
            msg = f"no rows were accumulated for step {step}"
            raise ValueError(msg)
        rate = rate_of(self._config, step)
        self._set_rate(rate)
        measured = self._optimise(objective.factor)
        self._steps_to_compare = max(0, self._steps_to_compare - 1)
        progress()
        return StepResult(objective.figures(measured) | {"learning_rate": rate})

    def _with_reference(self, samples: Sequence[TrainSample], progress: Callable[[], None]) -> Sequence[TrainSample]:
        """Add the reference's log-probs where this engine computes them; row by row in a deterministic run."""
        if self._reference is None or samples[0].reference_logprobs is not None:
            return samples
        parts = by_row(samples) if self._config.run.deterministic else [samples]
        budget, found = self._config.trainer.max_tokens_per_microbatch, []
        for part in parts:
            scored = self._forward.score(self._reference, part, budget, progress)
            found += [replace(s, reference_logprobs=logprobs) for s, logprobs in zip(part, scored, strict=True)]
        return found

    def _add_gradients(
        self,
        lengths: Sequence[int],
        loss_of: Callable[[list[int]], tuple[Tensor, dict[str, float]]],
        progress: Callable[[], None],
    ) -> None:
        """Forward and backward of sequences in micro-batches."""
        for indices in micro_batches(lengths, token_budget=self._config.trainer.max_tokens_per_microbatch):
            loss, measured = loss_of(indices)
            torch.autograd.backward(loss)
            self._parts.append(measured)
            progress()

    def _optimise(self, factor: Callable[[dict[str, float]], float] = lambda _: 1.0) -> dict[str, float]:
        """Multiply the gradients that were added up with `factor` of what was measured, clip, step."""
        measured, count = add_metrics(self._parts), float(len(self._parts))
        if (by := factor(measured)) != 1.0:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(by)
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.trainer.max_grad_norm))
        check_norm(norm)
        self._optimizer.step()
        self._encoder.invalidate()
        self.discard()
        return measured | {"gradient_norm": norm, "micro_batches": count}

    def _set_rate(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def publish(self, path: Path) -> str:
        """Write the weights; see the protocol."""
        return self._encoder.write_full(path)

    def delta(self) -> Callable[[Path], str] | None:
        """What writes the change since `remember`; see the protocol."""
        return self._encoder.delta_writer()

    def remember(self) -> None:
        """Take the weights for the base of the next delta; see the protocol."""
        self._encoder.set_base()

    def payloads(self) -> list[WeightPayload]:
        """The weights in memory; see `Offers`."""
        return self._encoder.payloads()

    def fingerprint(self) -> str:
        """Fingerprint of the weights; see the protocol."""
        return self._encoder.fingerprint()

    def _published(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to(self._dtype) for name, tensor in tensors_of(self._model).items()}

    def save(self, folder: Path) -> None:
        """Write a checkpoint; see the protocol."""
        _write(folder, self._state())

    def begin_save(self, folder: Path) -> Callable[[], None]:
        """Write a copy of the state meanwhile; see `SavesMeanwhile`."""
        copied = {
            # The reference never changes.
            file: held if file == REFERENCE else {n: t.detach().to("cpu", copy=True) for n, t in held.items()}
            for file, held in self._state().items()
        }
        return meanwhile(partial(_write, folder, copied))

    def _state(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds, by file."""
        state = self._optimizer.state_dict()["state"]
        flat = {f"{i}.{name}": value for i, entry in state.items() for name, value in entry.items()}
        found = {MODEL: tensors_of(self._model), OPTIMIZER: flat}
        return found if self._reference is None else found | {REFERENCE: tensors_of(self._reference)}

    def load(self, folder: Path) -> None:
        """Take a checkpoint; see the protocol."""
        copy_into(self._model, weights.load([folder / MODEL]), str(folder))
        self._encoder.invalidate()
        self._optimizer = self._new_optimizer(self._config.trainer.learning_rate)
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in weights.load([folder / OPTIMIZER]).items():
            index, _, name = key.partition(".")
            state.setdefault(int(index), {})[name] = value.clone()
        tree = self._optimizer.state_dict()
        tree["state"] = state
        self._optimizer.load_state_dict(tree)
        if (folder / REFERENCE).exists():
            self._set_reference(weights.load([folder / REFERENCE]))

    def export(self, folder: Path) -> None:
        """Write a model folder; see the protocol."""
        with weights.disk_errors(folder):
            self._model.save_pretrained(folder)


def _write(folder: Path, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    for file, tensors in state.items():
        weights.save(tensors, folder / file)
    (folder / "engine.json").write_text(json.dumps({"engine": "torch"}))
