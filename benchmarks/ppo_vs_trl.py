"""Compare PPO with a critic in relax-actors and in TRL's experimental PPOTrainer: completions per second and memory.

    python benchmarks/ppo_vs_trl.py                           # creates TRL's environment first, 2 GB
    python benchmarks/ppo_vs_trl.py --trl-python PYTHON --json

Model, prompts, reward, batch and figures are those of `grpo_vs_trl.py`. Both sides train a policy and a value model of
the same architecture on 64 completions of 32 tokens with 4 epochs of one minibatch, GAE(1, 0.95), whitened advantages,
value clipping, a k1 penalty of 0.05 to the first policy in the reward, and AdamW at 1e-3. TRL computes policy, values
and log-probs of the reference one after the other in one process; relax-actors in the actors rollout, reference, critic
and trainer, on-policy like TRL by default. Version 1.12 is the last one of TRL with a PPO trainer.

In TRL the reward comes from a model; here its place is taken by a module that computes the same reward from the tokens.
It computes the ratio from log-probs of the generation, so `algorithm.proximal` is "rollout".
"""

from __future__ import annotations

import tempfile

from grpo_relax_side import Algorithm
from grpo_vs_trl import compare, parse, run_relax, run_trl, trl_python
from grpo_workload import Workload

REQUIREMENTS = ("torch==2.13.0", "trl==1.12.*")

PPO = """
[algorithm]
name = "ppo"
kl = {{ coefficient = 0.05 }}

[roles.reference]

[critic]
learning_rate = {learning_rate}
device = "{device}"
"""


def algorithm(work: Workload) -> Algorithm:
    """Return PPO with a critic and a reference."""
    toml = PPO.format(learning_rate=work.learning_rate, device=work.device)
    return Algorithm(toml, ("rollout", "reference", "critic", "trainer"))


def main() -> None:
    """Run both sides interleaved and report."""
    arguments = parse((__doc__ or "").split("\n", 1)[0], "trl-ppo-venv", staleness=0)
    python = arguments.trl_python or trl_python(arguments.venv, REQUIREMENTS)
    work = Workload(tempfile.mkdtemp(prefix="ppo-vs-trl-"), arguments.steps, epochs=4)
    compare(
        arguments,
        work,
        lambda turn: run_relax(work, turn, arguments.staleness, algorithm(work)),
        lambda turn: run_trl(work, turn, python, "ppo_trl_side.py"),
    )


if __name__ == "__main__":
    main()
