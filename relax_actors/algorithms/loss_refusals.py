"""Combinations of loss settings that make no sense: policy loss, KL, corrections."""

from __future__ import annotations

from collections.abc import Iterator

from relax_actors.algorithms.named_functions import readers, spec_of_loss
from relax_actors.config import Config
from relax_actors.registry.catalog import ADVANTAGES, POLICY_LOSSES

MEAN_OF_SAMPLES = ("sample_mean_of_means", "sample_weight_length")
"""Aggregations that weigh a sample's loss by a known number, whatever its length."""


def loss_refusals(config: Config) -> Iterator[str]:
    """Yield a line for each combination of settings of the loss that cannot be meant."""
    yield from _loss(config)
    yield from _bounds(config)
    yield from _kl(config)
    yield from _correction(config)
    yield from _distillation(config)
    yield from _sampled_pairs(config)
    yield from _observations(config)


def _sampled_pairs(config: Config) -> Iterator[str]:
    """Refuse a loss of pairs without named pairs, or with weighted answers."""
    algorithm = config.algorithm
    is_own = algorithm.advantage not in ADVANTAGES.built_in
    if algorithm.advantage == "best_worst" and algorithm.surrogate in POLICY_LOSSES.built_in:
        if not algorithm.trains_sampled_pairs:
            yield (
                f'algorithm.advantage = "best_worst" names a pair of samples, and algorithm.surrogate = '
                f'"{algorithm.surrogate}" is not a pairwise loss; set algorithm.surrogate = "preference"'
            )
    elif algorithm.trains_sampled_pairs and not is_own:
        yield (
            f'algorithm.surrogate = "preference" trains a pair of samples, which algorithm.advantage = '
            f'"{algorithm.advantage}" does not name; set algorithm.advantage = "best_worst"'
        )
    if not algorithm.trains_sampled_pairs:
        return
    acting = {
        ("aggregate", algorithm.aggregate, "sample_mean_of_sums"): algorithm.aggregate != "sample_mean_of_sums",
        ("whiten", algorithm.whiten, "none"): algorithm.whiten != "none",
        ("scale", algorithm.scale, "none"): algorithm.scale != "none",
        ("components", algorithm.components, "sum"): algorithm.components != "sum",
        ("correction.kind", algorithm.correction.kind, "none"): algorithm.correction.kind != "none",
        ("reject.kind", algorithm.reject.kind, "none"): algorithm.reject.kind != "none",
        # The signs of the advantages say which answer is the chosen one.
        ("distil.place", algorithm.distil.place, "none"): algorithm.distil.place == "advantage",
    }
    for (setting, value, needed), is_set in acting.items():
        if is_set:
            yield (
                f'algorithm.{setting} = "{value}" would weigh the two answers of a pair apart; set algorithm.{setting} '
                f'= "{needed}"'
            )


def _loss(config: Config) -> Iterator[str]:
    algorithm, spec = config.algorithm, spec_of_loss(config.algorithm)
    sequence = algorithm.ratio.startswith("sequence") and spec.ratio != "sequence_product"
    if sequence and algorithm.aggregate not in MEAN_OF_SAMPLES:
        yield (
            f'algorithm.ratio = "{algorithm.ratio}" with algorithm.aggregate = "{algorithm.aggregate}" weighs samples '
            'by their length; set algorithm.aggregate = "sample_mean_of_means", or "sample_weight_length" for LUSPO'
        )
    if spec.over_sample == "mean" and algorithm.aggregate != "sample_mean_of_means":
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" with algorithm.aggregate = "{algorithm.aggregate}" weighs '
            'samples by their length; set algorithm.aggregate = "sample_mean_of_means"'
        )
    elif algorithm.aggregate == "sample_weight_length" and not algorithm.ratio.startswith("sequence"):
        yield (
            f'algorithm.aggregate = "sample_weight_length" with algorithm.ratio = "{algorithm.ratio}" is the mean of '
            'sums; set algorithm.ratio = "sequence_mean" for LUSPO, or algorithm.aggregate = "sample_mean_of_sums"'
        )
    if algorithm.positive_nll and algorithm.aggregate != "token_mean":
        yield (
            f"algorithm.positive_nll = {algorithm.positive_nll:g} is the factor of a mean over tokens, beside "
            f'algorithm.aggregate = "{algorithm.aggregate}"; set algorithm.aggregate = "token_mean"'
        )
    if algorithm.positive_nll and algorithm.reject.kind != "none" and not algorithm.reject.counted:
        yield (
            f"algorithm.positive_nll = {algorithm.positive_nll:g} is the factor of a mean over the tokens of correct "
            f'samples, some of which algorithm.reject.kind = "{algorithm.reject.kind}" leaves out of the loss; set '
            "algorithm.reject.counted = true, which counts them, or algorithm.positive_nll = 0"
        )
    if algorithm.ratio == "none" and spec.ratio == "setting":
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" reads a ratio, and algorithm.ratio is "none"; set '
            'algorithm.ratio = "token", or algorithm.surrogate = "score"'
        )
    yield from _stale_score(config)


def _observations(config: Config) -> Iterator[str]:
    """Refuse a loss of observations without any, or beside a loss of whole samples."""
    algorithm, spec = config.algorithm, spec_of_loss(config.algorithm)
    if not algorithm.observation_nll:
        return
    setting = f"algorithm.observation_nll = {algorithm.observation_nll:g}"
    if config.playing is None and config.data.kind != "traces" and config.rollout.actor == "rollout":
        yield (
            f"{setting} trains what an environment wrote, and samples of this run are completions without "
            "observations; add [environment] or [agent], or set algorithm.observation_nll = 0"
        )
    if config.media is not None:
        yield (
            f"{setting} would train the placeholders of images, videos and sounds, which no model predicts; use a "
            "model that reads text only, or set algorithm.observation_nll = 0"
        )
    whole = {
        f'algorithm.surrogate = "{algorithm.surrogate}"': bool(
            spec.needs_whole_step or spec.over_sample or spec.over_row
        ),
        f'algorithm.ratio = "{algorithm.ratio}"': algorithm.ratio.startswith("sequence"),
        f"algorithm.entropy.quantile = {algorithm.entropy.quantile:g}": algorithm.entropy.quantile < 1,
        f'algorithm.correction.normalise = "{algorithm.correction.normalise}"': (
            algorithm.correction.normalise != "none"
        ),
    }
    for other in (name for name, is_set in whole.items() if is_set):
        yield (
            f"{setting} needs a policy loss of single tokens, and {other} reads whole samples or steps; set for "
            'example algorithm.surrogate = "clip" with algorithm.ratio = "token"'
        )
    if algorithm.reject.kind != "none" and not algorithm.reject.counted:
        yield (
            f"{setting} is the factor of a mean beside a loss whose divisor algorithm.reject.kind = "
            f'"{algorithm.reject.kind}" changes; set algorithm.reject.counted = true'
        )


def _stale_score(config: Config) -> Iterator[str]:
    """Refuse a loss without a ratio for data that the trained weights did not sample."""
    algorithm, updates = config.algorithm, config.trainer.updates
    # A preference holds for answers of any policy.
    has_ratio = spec_of_loss(algorithm).ratio != "none" or algorithm.trains_sampled_pairs
    if has_ratio or algorithm.correction.kind != "none":
        return
    if config.staleness.max > 0:
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" has no ratio, and staleness.max = {config.staleness.max} '
            'trains samples of older weights; set staleness.max = 0, algorithm.correction.kind = "tis", or '
            'algorithm.surrogate = "clip"'
        )
    elif updates > 1:
        yield (
            f'algorithm.surrogate = "{algorithm.surrogate}" has no ratio, and {updates} updates of a batch train '
            "samples of older weights; set trainer.minibatches = 1 and trainer.epochs = 1, algorithm.correction.kind = "
            '"tis", or algorithm.surrogate = "clip"'
        )


def _bounds(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.clip_low > 1 and spec_of_loss(algorithm).clips_ratio:
        yield (
            f"algorithm.clip_low = {algorithm.clip_low:g} is the distance of the lower bound from 1, which is then "
            "below 0; set it to 1 for no lower bound, or to less"
        )
    low, high = algorithm.covariance_bounds
    if low >= high and algorithm.surrogate in readers(POLICY_LOSSES, "covariance_bounds"):
        yield (
            f"algorithm.covariance_bounds = [{low:g}, {high:g}] has no covariance between its bounds, so that no token "
            "would be chosen; write the lower bound first"
        )


def _kl(config: Config) -> Iterator[str]:
    kl = config.algorithm.kl
    if kl.place == "loss" and kl.kind == "k1" and not (kl.k2_gradient or kl.unbiased):
        yield (
            'algorithm.kl.kind = "k1" as a term of the loss has an expected gradient of 0; set algorithm.kl.kind = '
            '"k2" or "k3", or algorithm.kl.place = "reward"'
        )
    if kl.place == "reward" and "reference" not in config.roles:
        yield (
            'algorithm.kl.place = "reward" needs log-probs of the reference before the advantages; add '
            '[roles.reference], or set algorithm.kl.place = "loss"'
        )


def _correction(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    correction, reject = algorithm.correction, algorithm.reject
    spec = spec_of_loss(algorithm)
    if correction.kind != "none" and spec.ratio == "rollout":
        yield (
            f'algorithm.correction.kind = "{correction.kind}" with algorithm.surrogate = "{algorithm.surrogate}" '
            f"counts the distance from the rollout twice: the ratio of {algorithm.surrogate} is to the rollout "
            'already; set algorithm.correction.kind = "none"'
        )
    elif correction.kind != "none" and algorithm.proximal == "rollout" and spec.ratio != "none":
        yield (
            f'algorithm.correction.kind = "{correction.kind}" weighs by the proximal policy over the rollout policy, '
            'which are the same here; set algorithm.proximal to "trainer" or "actor_fwd"'
        )
    if correction.normalise != "none" and spec.over_sample:
        yield (
            f'algorithm.correction.normalise = "{correction.normalise}" with algorithm.surrogate = '
            f'"{algorithm.surrogate}" would scale the weights inside a number of the whole sample, before their mean '
            'over the step is known; set algorithm.correction.normalise = "none"'
        )
    if reject.opsm is not None and algorithm.proximal == "trainer" and config.trainer.updates == 1:
        yield (
            f"algorithm.reject.opsm = {reject.opsm:g} bounds the log-ratio of the proximal to the trained policy, "
            'which is 0 while a batch is trained once; set algorithm.proximal = "rollout", or trainer.minibatches '
            "above 1"
        )
    bounded = {"correction": correction.kind == "icepop", "reject": reject.kind in ("geometric", "max", "product")}
    for section, is_bounded in bounded.items():
        if is_bounded and getattr(algorithm, section).low == 0:
            yield (
                f"algorithm.{section}.low = 0 is no lower bound of a ratio; set it between 0 and 1, such as 0.5"
                + (', or use algorithm.correction.kind = "tis"' if section == "correction" else "")
            )


def _distillation(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.distil.place != "none" and "teacher" not in config.roles:
        yield (
            f'algorithm.distil.place = "{algorithm.distil.place}" needs a teacher; add [roles.teacher] with '
            'model = "<folder>", server = <URL>, or hint for self-distillation'
        )
    is_own_loss = algorithm.surrogate not in POLICY_LOSSES.built_in
    if algorithm.advantage == "none" and algorithm.distil.place == "none" and not is_own_loss:
        yield (
            'algorithm.advantage = "none" trains nothing without distillation; set algorithm.distil.place, or another '
            "algorithm.advantage"
        )
    yield from _taught(config)


def _taught(config: Config) -> Iterator[str]:
    """Refuse what is about samples of the policy where a teacher writes samples."""
    algorithm, distil = config.algorithm, config.algorithm.distil
    if distil.student_share == 1 or distil.place != "loss":  # elsewhere the setting is idle
        return
    setting = f"algorithm.distil.student_share = {distil.student_share:g}"
    if distil.top_k is None:
        yield (
            f"{setting}: without algorithm.distil.top_k the divergence is estimated at tokens that the student "
            "samples, and the teacher writes some; set algorithm.distil.top_k, such as 64"
        )
    of_policy = {
        ("advantage", algorithm.advantage, "none"): algorithm.advantage != "none",
        ("correction.kind", algorithm.correction.kind, "none"): algorithm.correction.kind != "none",
        ("reject.kind", algorithm.reject.kind, "none"): algorithm.reject.kind != "none",
        ("kl.place", algorithm.kl.place, "none"): algorithm.kl.place == "reward",
    }
    for (name, value, off), is_set in of_policy.items():
        if is_set:
            yield (
                f'{setting} trains samples of the teacher, and algorithm.{name} = "{value}" is about those of the '
                f'policy; set algorithm.{name} = "{off}", or algorithm.distil.student_share = 1'
            )
    if "teacher" in config.roles and (actor := config.roles["teacher"].actor) != "teacher":
        yield (
            f'{setting} needs the weights of a built-in teacher, and roles.teacher.actor = "{actor}" is your own; '
            "leave it out, or set algorithm.distil.student_share = 1"
        )
    if config.playing is not None or config.rollout.actor != "rollout":
        where = "rollout.actor" if config.playing is None else f"[{config.playing.title}]"
        yield (
            f"{setting}: a teacher writes single answers, and {where} makes other samples; remove it, or set "
            "algorithm.distil.student_share = 1"
        )
    if config.trainer.router_replay:
        yield (
            f"{setting}: a teacher records no experts of the policy for trainer.router_replay; leave that out, or set "
            "algorithm.distil.student_share = 1"
        )
