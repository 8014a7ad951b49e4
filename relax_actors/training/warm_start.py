"""Warm start: supervised steps on answers, for models with random weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from broker.codec import Array
from broker.store import Store
from broker.subjects import RowId
from relax_actors.config import Config
from relax_actors.data.mixture import Mixture, plan_of
from relax_actors.data.prompt_maker import PromptMaker, admission_of, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import TrainingEngine, TrainSample
from relax_actors.engines.protocols.media import PromptMedia
from relax_actors.errors import ActorError, ConfigError, RowError, SlowRowError
from relax_actors.messages import Prompt
from relax_actors.runtime.seeds import derive_seed
from relax_actors.training.step_feed import diverged

MAX_ATTEMPTS_PER_ROW = 20
_FIRST_ROW = RowId(0, 0)
"""The row whose step keeps features, and copies of media that the data holds itself: a file is decoded once."""


def warm_start(config: Config, engine: TrainingEngine, progress: Callable[[], None], store: Store) -> float:
    """Train `trainer.warm_start.steps` supervised steps.

    Rows are drawn at random from the training data, seeded by run.seed; those of a mixture by its first weights, and
    rows without an answer are passed over. The stop token is appended to every answer.

    Returns:
        Loss of the last step in nats per token; 0 without a warm start.

    Raises:
        ConfigError: too few rows of the data have an answer that fits, or the loss diverged.
        ActorError: a row took too long to prepare.
    """
    settings = config.trainer.warm_start
    if settings is None:
        return 0.0
    examples = _Examples(config, store, progress)
    generator = np.random.Generator(np.random.Philox(key=derive_seed(config.run.seed, "warm_start")))
    loss, drawn = 0.0, 0
    for step in range(settings.steps):
        samples: list[TrainSample] = []
        attempts = 0
        while len(samples) < settings.rows:
            attempts += 1
            if attempts > MAX_ATTEMPTS_PER_ROW * settings.rows:
                msg = "trainer.warm_start found too few rows with an answer that fits; check data.fields.answer"
                raise ConfigError(msg)
            sample = examples.sample(examples.draw(generator, drawn))
            drawn += 1
            if sample is not None:
                samples.append(sample)
        try:
            loss = engine.warm_start(samples, settings.learning_rate, progress).metrics["loss"]
        except FloatingPointError as error:
            msg = f"trainer.warm_start, step {step}: {diverged(error, config.algorithm, 'trainer.warm_start')}"
            raise ConfigError(msg) from error
    return float(loss)


class _Examples:
    """Rows of the training data with their answers."""

    def __init__(self, config: Config, store: Store, progress: Callable[[], None]) -> None:
        self._source = open_data(config.data, config.media)
        self._plan = plan_of(config.data.model_copy(update={"curriculum": ()}), config.trainer.prompts_per_step)
        self._tokenizer = Tokenizer(config.model_path)
        self._room = room(config)
        admission = admission_of(config, store)
        self._maker = PromptMaker(config.data, self._tokenizer, self._room, config.rollout.max_tokens, admission)
        self._stop = np.array(sorted(self._tokenizer.stop_ids)[:1], np.int32)
        self._read: Callable[[Prompt], tuple[Array, PromptMedia | None]] = lambda prompt: (prompt.tokens, None)
        self._barred: tuple[int, ...] = ()
        if config.media is not None and admission is not None:
            self._barred = admission.family.barred
            self._read = _media_reader(config, store, progress)

    def draw(self, generator: np.random.Generator, n: int) -> int:
        """Return the row of draw n: random; in a mixture, of the source of row n."""
        first, last = 0, len(self._source)
        if self._plan is not None and isinstance(self._source, Mixture):
            k, _ = self._plan.at(n)
            first, last = self._source.starts[k : k + 2]
        return int(generator.integers(first, last))

    def sample(self, index: int) -> TrainSample | None:
        """Return a row as a sample; None if it cannot be used.

        Raises:
            ActorError: the row took too long on this machine. To skip it would make the run depend on the load.
        """
        try:
            task = self._source[index]
            prompt = self._maker.make(task, _FIRST_ROW, seed=0, min_version=0)
            answer = self._tokenizer.encode(task.answer, special=False)
            tokens, media = self._read(prompt)
        except SlowRowError as error:
            msg = f"warm start: {error}"
            raise ActorError(msg) from error
        except RowError:
            return None
        # A barred token has probability 0 under the model, so the loss of such an answer is infinite.
        if not 0 < len(answer) < self._room - len(tokens) or np.isin(answer, self._barred).any():
            return None
        return TrainSample.of_completion(tokens, np.concatenate([answer, self._stop]), media=media)


def _media_reader(
    config: Config, store: Store, progress: Callable[[], None]
) -> Callable[[Prompt], tuple[Array, PromptMedia]]:
    """Return a function that prepares the media of a prompt, as the role `media` does."""
    from relax_actors.data.download import Downloads  # noqa: PLC0415 runs with text alone need neither
    from relax_actors.training.media_preparer import MediaPreparer  # noqa: PLC0415

    preparer = MediaPreparer(config, store)
    folder = f"{_FIRST_ROW.kind}/{_FIRST_ROW.step}"
    downloads = None if config.media is None else Downloads(config.media, store, progress)

    def read(prompt: Prompt) -> tuple[Array, PromptMedia]:
        for source in prompt.media:
            if source.url and downloads is not None:
                downloads.fetch(source)
        progress()
        return preparer.prepare_mapped(prompt, folder)

    return read
