"""Warm start: supervised steps on the data's answers, for models with random initial weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from relax_actors.config import Config
from relax_actors.data.prompt_maker import PromptMaker, open_data, room
from relax_actors.data.tokenizer import Tokenizer
from relax_actors.engines.protocols import TrainingEngine, TrainSample
from relax_actors.errors import ConfigError, RowError
from relax_actors.runtime.seeds import derive_seed

MAX_ATTEMPTS_PER_ROW = 20


def warm_start(config: Config, engine: TrainingEngine, progress: Callable[[], None]) -> float:
    """Train `trainer.warm_start.steps` supervised steps.

    Rows are drawn at random from the training data, seeded by run.seed. The stop token is appended to every answer.

    Returns:
        Loss of the last step in nats per token; 0 without a warm start.

    Raises:
        ConfigError: too few rows of the data have an answer that fits.
    """
    settings = config.trainer.warm_start
    if settings is None:
        return 0.0
    source = open_data(config.data)
    tokenizer = Tokenizer(config.model_path)
    max_tokens = room(config)
    maker = PromptMaker(config.data, tokenizer, max_tokens, config.rollout.max_tokens)
    stop = np.array(sorted(tokenizer.stop_ids)[:1], np.int32)
    generator = np.random.Generator(np.random.Philox(key=derive_seed(config.run.seed, "warm_start")))
    loss = 0.0
    for _ in range(settings.steps):
        samples: list[TrainSample] = []
        attempts = 0
        while len(samples) < settings.rows:
            attempts += 1
            if attempts > MAX_ATTEMPTS_PER_ROW * settings.rows:
                msg = "trainer.warm_start found too few rows with an answer that fits; check data.answer_field"
                raise ConfigError(msg)
            try:
                task = source[int(generator.integers(len(source)))]
                prompt = maker.make(task, seed=0, min_version=0)
                answer = tokenizer.encode(task.answer, special=False)
            except RowError:
                continue
            if 0 < len(answer) < max_tokens - len(prompt.tokens):
                samples.append(TrainSample.of_completion(prompt.tokens, np.concatenate([answer, stop])))
        loss = engine.warm_start(samples, settings.learning_rate, progress).metrics["loss"]
    return float(loss)
