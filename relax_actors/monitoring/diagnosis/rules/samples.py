"""Rules about what the model writes: lengths, ends, repetition, templates."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.monitoring.diagnosis.observations import Observations
from relax_actors.monitoring.diagnosis.rule import rule
from relax_actors.monitoring.diagnosis.rules.rewards import STEPS, is_sampled
from relax_actors.monitoring.diagnosis.statistics import ends, level, rank_correlation, values
from relax_actors.monitoring.finding import Finding

FIRST = 3
"""First steps in which a mistake of the set-up shows."""
AT_CAP, NEVER = 0.75, 0.98
MANY_TEXTS = 0.2
LONGER = 1.5


@rule("No sample ends by itself: the model's end token is not a stop token.")
def never_ends(seen: Observations) -> Iterator[Finding]:
    """Find first steps in which every sample runs into the limit of tokens."""
    first = seen.series("truncated")[:FIRST]
    if not is_sampled(seen) or len(first) < FIRST or min(values(first)) < NEVER or seen.setting("agent"):
        return
    cap = int(seen.setting("rollout.max_tokens", 0))
    if cap == 1:
        return
    # Rewards that differ within a row show that cut samples solve the task: its answers may have a fixed length.
    is_rewarded = level(seen.series("no_signal")[:FIRST]) < 0.5 and bool(seen.series("no_signal"))  # noqa: PLR2004
    yield Finding(
        f"all samples of the first {FIRST} steps end at the limit of {cap} tokens, and none by itself",
        is_problem=not is_rewarded,
        evidence=(seen.of_steps((first[0][0], first[-1][0]), truncated=level(first)),),
        remedy="check that the tokenizer's end token is the token that the chat template ends a message with "
        "(eos_token_id of generation_config.json), or raise rollout.max_tokens",
        settings=("rollout.max_tokens", "rollout.stop"),
    )


@rule("Most samples are cut at the limit of tokens.")
def length_at_cap(seen: Observations) -> Iterator[Finding]:
    """Find steps with mostly truncated samples, although samples ended before."""
    last, first = seen.series("truncated")[-10:], seen.series("truncated")[:FIRST]
    if not is_sampled(seen) or len(last) < STEPS or level(last) < AT_CAP or level(first) >= NEVER:
        return
    yield Finding(
        f"{level(last):.0%} of the samples are cut at rollout.max_tokens = {seen.setting('rollout.max_tokens')}",
        is_problem=False,
        evidence=(seen.of_steps((last[0][0], last[-1][0]), truncated=level(last)),),
        remedy="raise rollout.max_tokens, penalise length, or leave cut samples out (algorithm.shaping.mask_truncated)",
        settings=("rollout.max_tokens", "algorithm.shaping.mask_truncated"),
    )


@rule("The end token is never trained, so the model does not learn to stop.", "huggingface/trl#1623")
def end_not_trained(seen: Observations) -> Iterator[Finding]:
    """Find steps in which the last token of samples that ended by themselves is masked."""
    series = seen.series("end_trained")
    if len(series) >= FIRST and max(values(series)) <= 0.02:  # noqa: PLR2004
        yield Finding(
            f"the last token of samples that end by themselves is never trained, in {len(series)} steps",
            evidence=(seen.of_steps((series[0][0], series[-1][0]), end_trained=level(series)),),
            remedy="include the end token in the loss mask: a padding token equal to the end token masks both",
            settings=("examples.train",),
        )


@rule("Samples that end by themselves end in different tokens: the end token is left out of them.")
def ends_differ(seen: Observations) -> Iterator[Finding]:
    """Find first steps in which ended samples have no common last token."""
    first = seen.series("end_share")[:10]
    if len(first) < FIRST or level(first) >= 0.5:  # noqa: PLR2004
        return
    if any(seen.setting(name) for name in ("rollout.stop", "agent", "gateway")):
        return  # samples end at a stop text, or where a client of the gateway ends its conversation
    yield Finding(
        f"samples that end by themselves share a last token in {level(first):.0%} of the cases only",
        evidence=(seen.of_steps((first[0][0], first[-1][0]), end_share=level(first)),),
        remedy="a rollout must return the end token with its log-prob, or the model does not learn to stop",
    )


@rule("Completions spell marks of a chat template.")
def marks_in_texts(seen: Observations) -> Iterator[Finding]:
    """Find texts that go on after the end of their message."""
    last = seen.series("marked")[-10:]
    if len(last) >= FIRST and level(last) > MANY_TEXTS:
        yield Finding(
            f"{level(last):.0%} of the completions contain marks of a chat template, such as <|im_end|>",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), marked=level(last)),),
            remedy="the prompt is not built by the model's own chat template, or its end-of-message token does not "
            "stop generation; compare `relax samples` with the template",
            settings=("model.path", "rollout.stop"),
        )


@rule("Every prompt begins with the same token twice: a doubled begin token.", "huggingface/open-r1#462")
def doubled_begin(seen: Observations) -> Iterator[Finding]:
    """Find prompts whose first token is there twice."""
    first = seen.series("prompt_doubled")[:10]
    rows = len(first) * int(seen.setting("trainer.prompts_per_step", 1))
    if len(first) >= FIRST and min(values(first)) == 1.0 and rows >= 8:  # noqa: PLR2004
        yield Finding(
            "every prompt begins with the same token twice",
            evidence=(seen.of_steps((first[0][0], first[-1][0]), prompt_doubled=1.0),),
            remedy="the chat template writes the begin token, and the tokenizer adds it again: leave it out of one "
            "of them",
            settings=("model.path", "data.template"),
        )


@rule("Texts repeat themselves.")
def repetitive_texts(seen: Observations) -> Iterator[Finding]:
    """Find texts with few distinct n-grams, or that shrink to a tenth when compressed."""
    last = seen.series("repetitive")[-10:]
    if len(last) >= FIRST and level(last) > MANY_TEXTS:
        yield Finding(
            f"{level(last):.0%} of the texts repeat themselves",
            evidence=(seen.of_steps((last[0][0], last[-1][0]), repetitive=level(last)),),
            remedy="read samples; add the reward function repetition, a KL to the reference, or a lower learning rate",
            settings=("reward.function", "algorithm.kl.coefficient", "trainer.learning_rate"),
        )


@rule("All samples of a group are the same text from the first step on.")
def identical_samples(seen: Observations) -> Iterator[Finding]:
    """Find groups that are drawn without randomness, or with one seed for all samples."""
    size = int(seen.setting("rollout.group_size", 1))
    first = seen.series("distinct")[:FIRST]
    if not is_sampled(seen) or size < 2 or len(first) < FIRST or max(values(first)) > 1.01 / size:  # noqa: PLR2004
        return
    yield Finding(
        f"all {size} samples of a group are identical in the first {len(first)} steps",
        evidence=(seen.of_steps((first[0][0], first[-1][0]), distinct=level(first)),),
        remedy="each sample needs random numbers of its own: check the engine's seed, temperature and top_p",
        settings=("rollout.temperature", "rollout.top_p"),
    )


@rule("Samples grow longer without a better reward: length bias of the loss.", "arXiv 2503.20783")
def length_bias(seen: Observations) -> Iterator[Finding]:
    """Find growing lengths, longest where the reward is low, while the reward stands still."""
    length, reward = seen.series("length_mean"), seen.series("reward")
    grown, better = ends(length), ends(reward)
    if not is_sampled(seen) or grown is None or better is None or len(length) < 8:  # noqa: PLR2004
        return
    trend = rank_correlation([float(step) for step, _ in length], values(length))
    gap = [
        f["length_worse"] / max(f["length_better"], 1.0)
        for _, f in sorted(seen.steps.items())[-10:]
        if "length_worse" in f and "length_better" in f
    ]
    wrong_is_longer = bool(gap) and sorted(gap)[len(gap) // 2] > 1.15  # noqa: PLR2004
    stands_still = better[1] - better[0] <= 0.02 * max(1.0, abs(better[0]))
    if grown[1] > LONGER * grown[0] and trend > 0.7 and wrong_is_longer and stands_still:  # noqa: PLR2004
        aggregate = seen.setting("algorithm.aggregate", "")
        yield Finding(
            f"samples grew from {grown[0]:.0f} to {grown[1]:.0f} tokens, the worse ones most, and the reward did not "
            "rise",
            evidence=(seen.of_steps((length[0][0], length[-1][0]), first=grown[0], last=grown[1]),),
            remedy=f'with algorithm.aggregate = "{aggregate}" a long wrong sample costs less a token; set "constant", '
            "or penalise length",
            settings=("algorithm.aggregate", "algorithm.shaping.overlong"),
        )
