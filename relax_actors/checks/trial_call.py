"""Process that calls a reward function or an environment once, for `relax check`.

Started as `python -m relax_actors.checks.trial_call <folder> <setting>`, perhaps in the sandbox of the role, with a
prompt on its standard input. It writes one line of JSON to its standard output: a reward, or an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from broker.codec import decode_fields, open_envelope
from relax_actors.config import Config
from relax_actors.errors import RelaxError
from relax_actors.messages import Act, Open, Prompt, Sample
from relax_actors.messages.environment import OPENED
from relax_actors.messages.samples import TokenSequence
from relax_actors.rewards.scorer import RewardScorer
from relax_actors.roles import section_of
from relax_actors.runtime.run_folder import RunFolder

ENVIRONMENT = "environment.name"


def main() -> None:
    """Call what a setting names, and write the result."""
    # What the code prints must not be taken for the result.
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        try:
            result = _called(Path(sys.argv[1]), sys.argv[2], sys.stdin.buffer.read())
        except (Exception, SystemExit) as error:  # noqa: BLE001 of the user's code
            result = {"error": described(error)}
        output.write(json.dumps(result))
    os._exit(0)  # a thread of the user's code must not keep the process


def _called(root: Path, setting: str, row: bytes) -> dict[str, Any]:
    config, prompt = RunFolder(root).load_config(), decode_fields(open_envelope(row), Prompt)
    if limit := section_of(config, role_of(setting)).memory_limit_mib:
        from relax_actors.runtime.watchdog import limit_memory  # noqa: PLC0415 imports NATS, which no check needs

        limit_memory(limit)
    if setting == ENVIRONMENT:
        return asyncio.run(_played(config, prompt))
    return {"reward": reward_of_answer(config, setting, prompt)}


def role_of(setting: str) -> str:
    """Return the role that calls what a setting names."""
    return "environment" if setting == ENVIRONMENT else "reward"


def reward_of_answer(config: Config, setting: str, prompt: Prompt) -> float:
    """Score a row's answer as a completion, by the reward of `setting`.

    Each character counts as a token, at least one; each measurement of an episode is 1, its reward 0, and so are scores
    of roles.

    Raises:
        RowError: a function did not return a finite number or score.
    """
    held_out = {f"{where}.reward": each.reward for where, each in config.held_out_sets.items()}
    function = held_out.get(setting, config.reward.function)
    options, deadline = config.reward.options, config.reward.deadline
    scorer = RewardScorer(function, setting, options, deadline, columns=config.roles)
    has_episodes = config.environment is not None or config.agent is not None
    tokens = np.zeros(max(1, len(prompt.answer)), np.int32)
    sample = Sample(
        (TokenSequence.of_completion(prompt.tokens, tokens, tokens.astype(np.float32), tokens),),
        prompt.answer,
        metrics=defaultdict(lambda: 1.0, environment_reward=0.0) if has_episodes else {},
        messages=[*prompt.messages, {"role": "assistant", "content": prompt.answer}],
    )
    columns = dict.fromkeys(scorer.columns, (0.0,))
    return asyncio.run(scorer.score([prompt.answer], prompt, [sample], columns))[0].reward


async def _played(config: Config, prompt: Prompt) -> dict[str, Any]:
    """Open an episode and take one turn, with the answer of the row as the action."""
    from relax_actors.envs.loading import load_environment  # noqa: PLC0415 only an environment needs it
    from relax_actors.envs.session import Session, Template, guarded  # noqa: PLC0415
    from relax_actors.sessions.episode_start import task_of  # noqa: PLC0415

    section = config.environment
    assert section is not None  # noqa: S101 the parent has checked it
    session = Session(Template(*load_environment(section), section.max_observation_bytes, section.players))
    answer = await guarded(session.open, Open("check", task_of(prompt), seed=0), OPENED)
    if not answer.error and not answer.done:
        answer = await guarded(session.act, Act("check", 0, prompt.answer), 0)
    if answer.error:
        return {"error": f"{'reset' if answer.turn == OPENED else 'step'}: {answer.detail}"}
    await session.close()
    return {"reward": answer.reward}


def described(error: BaseException) -> str:
    """Describe an exception by type, text and line; ours explain themselves."""
    if isinstance(error, RelaxError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


if __name__ == "__main__":
    main()
