"""Role `reward_model`: scores of samples by a trained reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from broker.codec import Array
from relax_actors.config import Config
from relax_actors.data.score_folder import read_score_folder
from relax_actors.data.scored_answers import ScoredAnswer
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.engines.protocols.samples import TrainSample
from relax_actors.errors import RelaxError, RowError
from relax_actors.messages import FinishReason, Reward, Trajectory
from relax_actors.registry.role_spec import RoleSpec
from relax_actors.rewards.step_values import token_values, value_of, value_of_steps
from relax_actors.roles.reward_columns import kinds_read
from relax_actors.roles.reward_model_check import SECTION, CheckedRewardModel
from relax_actors.runtime import Row
from relax_actors.training.row_media import RowMedia, with_media

if TYPE_CHECKING:  # import torch
    from relax_actors.engines.sglang.reward_model import SglangRewardModel
    from relax_actors.engines.torch.reward_model import TorchRewardModel


class RewardModel(CheckedRewardModel):
    """Scores trajectories with a frozen model; the role `reward` combines the scores.

    The samples are tokenized by the reward model's own tokenizer and chat template, as the answers of its training. A
    sample whose environment or agent failed has score 0, and the model does not see it. A prompt with media has
    the tokens and features of the policy, whose family and tokenizer the reward model shares. With run.deterministic
    rows are scored one by one, so that the bits of a score do not depend on the other rows that are ready.
    """

    reads: ClassVar = ("prompt", "trajectory")
    writes: ClassVar = "reward_model"
    kinds: ClassVar = ("group", "eval")
    batch_wait = 0.003
    spec: ClassVar = RoleSpec(device=True, start_order=72)

    def inputs(self, config: Config) -> tuple[str, ...]:
        """Return the columns to read: also the media of the prompt if the model takes media."""
        return with_media(self.reads, config)

    def row_limit(self) -> int:
        """Return the maximum number of rows scored at once."""
        return 1 if self.context.config.run.deterministic else self.max_concurrent_rows

    def setup(self) -> None:
        """Load the reward model and its tokenizer."""
        from relax_actors.engines.torch.process_setup import configure_torch  # noqa: PLC0415 only a process that scores needs torch

        config: Config = self.context.config
        self._folder = read_score_folder(self.model, f"{SECTION}.model")
        self._tokenizer = Tokenizer(config.model_path)
        self._answers = self.answers(config, Tokenizer(self.model), self._folder)
        self._media = None if config.media is None else RowMedia(self.context)
        self._scored = 0
        self._wanted = kinds_read(config, self.context.role, self)
        configure_torch(config.run)
        with self.context.device_lock():
            self._engine = self._built()

    def _built(self) -> TorchRewardModel | SglangRewardModel:
        if self.backend == "sglang":
            from relax_actors.engines.sglang.backend import SglangBackend  # noqa: PLC0415 only this kind needs a server
            from relax_actors.engines.sglang.reward_model import SglangRewardModel  # noqa: PLC0415

            return SglangRewardModel(self.context, SglangBackend.own_server(), self.model, self.device)
        from relax_actors.engines.torch.reward_model import TorchRewardModel  # noqa: PLC0415 as in `setup`

        engine = TorchRewardModel(self.context.config, self.model, self._folder, self.device)
        self.context.shares_memory(engine)
        return engine

    def handle_many(self, rows: Sequence[Row]) -> list[Any]:
        """Score rows together; a row that cannot be scored gets its error.

        Rows whose reward does not read the scores get None.
        """
        results: list[Any] = []
        media: dict[int, PromptMedia] = {}
        for n, row in enumerate(rows):
            try:
                wanted = row.id.kind in self._wanted
                if wanted and self._media is not None:
                    media[n] = self._media.of(row.media, row.id)
                results.append(self._tokenized(row) if wanted else None)
            except RelaxError as error:
                results.append(error)
        good = [n for n, result in enumerate(results) if isinstance(result, dict)]
        samples = [_sample(n, i, answer, media.get(n)) for n in good for i, answer in results[n].items()]
        scored = iter(self._engine.score(samples, self.progress) if samples else [])
        self._scored += len(samples)
        for n in good:
            scores = {i: next(scored) for i in results[n]}
            try:
                results[n] = self._reward(rows[n].trajectory, results[n], scores)
            except RowError as error:
                results[n] = error
        return results

    def _tokenized(self, row: Row) -> dict[int, ScoredAnswer]:
        """Return the tokens of the samples that did not fail, by the number of the sample."""
        trajectory: Trajectory = row.trajectory
        said = trajectory.samples if trajectory.conversations is not None else None
        tokens = None if self._media is None else row.media.tokens
        return {
            i: self._answers.of(row.prompt, text, () if said is None else said[i].messages, tokens)
            for i, text in enumerate(trajectory.texts)
            if trajectory.finish_reasons[i] != FinishReason.ERROR
        }

    def _reward(self, trajectory: Trajectory, answers: dict[int, ScoredAnswer], scores: dict[int, Array]) -> Reward:
        """Return the column of a row; raises RowError if a score is not finite."""
        lengths = trajectory.sample_lengths.astype(np.int32)
        values = np.zeros(len(lengths), np.float32)
        is_dense = self._folder.of_steps and self.steps == "tokens"
        tokens = [np.zeros(length, np.float32) for length in lengths.tolist()] if is_dense else []
        begins = np.cumsum(lengths) - lengths
        for i, answer in answers.items():
            scored = value_of(scores[i], self.value, self.label)
            if not np.isfinite(scored).all():
                msg = (
                    f"the reward model gives sample {i} a score of {scored[~np.isfinite(scored)][0]}; check its folder"
                )
                raise RowError(msg)
            if is_dense:
                own = trajectory.token_ids[begins[i] : begins[i] + lengths[i]]
                tokens[i] = token_values(scored, answer.ends, own, self._tokenizer.decode)
            else:
                values[i] = value_of_steps(scored, self.steps if self._folder.of_steps else "last")
        return Reward(values, {}, np.concatenate(tokens) if tokens else None, lengths if tokens else None)

    def metrics(self) -> dict[str, float]:
        """Return the samples scored by this incarnation."""
        return {"scored_samples": self._scored}

    def close(self) -> None:
        """Release the memory of the model."""
        self._engine.close()


def _sample(row: int, sample: int, answer: ScoredAnswer, media: PromptMedia | None) -> TrainSample:
    example = answer.example
    zeros = np.zeros(len(example.ids), np.float32)
    return TrainSample(example.ids, example.mask, targets=zeros, media=media, row=row, sample=sample)
