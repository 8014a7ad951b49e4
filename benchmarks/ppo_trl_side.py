"""TRL's side of `ppo_vs_trl.py`: `python ppo_trl_side.py WORKLOAD.json RESULT.json`, in TRL's environment.

Settings equal those of relax-actors' side: constant learning rate, no weight decay, float32, one minibatch of all
completions in each epoch. Gradient checkpointing is off, as in `grpo_trl_side.py`. End and padding are never sampled,
so that all completions have the same length. Nothing is saved or reported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from grpo_workload import Workload
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Ends(TrainerCallback):
    """Records the end of each step in Unix seconds, and the lengths of the completions."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_args: Any, **_keywords: Any) -> None:
        """Called by the trainer after the last update of a batch."""
        self.times.append(time.time())


class Digits(torch.nn.Module):
    """Stands in for a reward model: the fraction of the completion's characters that are digits."""

    base_model_prefix = "backbone"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        super().__init__()
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.register_buffer("digit", torch.tensor([float(text.isdigit()) for text in texts]))
        self.prompt_tokens = prompt_tokens

    def backbone(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Return the fraction of digits up to each token as a hidden state, `[batch, seq, 1]`."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        sampled = positions >= self.prompt_tokens
        lengths = (positions - self.prompt_tokens + 1).clamp(min=1)
        return SimpleNamespace(hidden_states=[((self.digit[input_ids] * sampled).cumsum(1) / lengths)[..., None]])

    def score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the reward after each token."""
        return hidden


def main() -> None:
    """Train for the workload's steps; write the end times of the steps and the rewards."""
    work, result = Workload.load(Path(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(work.threads)
    loading = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    policy, reference = (AutoModelForCausalLM.from_pretrained(work.model, **loading) for _ in range(2))
    critic = AutoModelForSequenceClassification.from_pretrained(work.model, num_labels=1, **loading)
    tokenizer = AutoTokenizer.from_pretrained(work.model, padding_side="left")
    policy.generation_config.suppress_tokens = sorted({tokenizer.pad_token_id, tokenizer.eos_token_id})
    prompts = [json.loads(line)["prompt"] for line in work.prompts.read_text().splitlines()]
    rows = [{"input_ids": tokenizer(prompt)["input_ids"]} for prompt in prompts for _ in range(work.samples)]
    settings = PPOConfig(
        output_dir=str(result.with_suffix(".trl")),
        per_device_train_batch_size=work.completions,
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=work.epochs,
        total_episodes=work.completions * work.steps,
        local_rollout_forward_batch_size=work.completions,
        response_length=work.new_tokens,
        temperature=1.0,
        kl_coef=0.05,
        lam=0.95,
        num_sample_generations=0,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=work.precision == "bfloat16",
        use_cpu=work.device == "cpu",
        seed=work.seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    ends = Ends()
    trainer = PPOTrainer(
        args=settings,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=Digits(tokenizer, work.prompt_tokens),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[: work.completions]),
        value_model=critic,
        callbacks=[ends],
    )
    # TRL's mixed precision covers updates alone: generation, reference and values would be in float32.
    half = work.precision == "bfloat16"
    with torch.autocast("cpu" if work.device == "cpu" else "cuda", torch.bfloat16, enabled=half):
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "objective/scores" in entry]
    body = {
        "times": ends.times,
        "rewards": [entry["objective/scores"] for entry in logged],
        "lengths": [float(work.new_tokens) if entry["val/num_eos_tokens"] == 0 else -1.0 for entry in logged],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
    }
    result.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
