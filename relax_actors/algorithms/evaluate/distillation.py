"""Evaluator of distillation: divergences over a vocabulary, signals at tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_actors.algorithms.distillation import distillation_loss, sampled_reverse_kl
from relax_actors.algorithms.evaluate.accepted import check_name, check_settings, number
from relax_actors.algorithms.evaluate.inputs import Evaluation, Inputs
from relax_actors.algorithms.evaluate.losses import mean_over_tokens
from relax_actors.config.algorithm_parts import DistilSection

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def distillation(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    """Evaluate a divergence, a mean over tokens, or the advantage of on-policy distillation.

    All are multiplied by the setting `coefficient`, by default 1.

    - "forward_kl", "reverse_kl", "jsd": with inputs `logits` and `teacher_logits`, over the teacher's `top_k` most
      likely tokens, or the whole vocabulary without it.
    - "reverse_kl" with inputs `logprobs` and `teacher_logprobs`: estimated at the sampled tokens.
    - "advantage": what `algorithm.distil.place = "advantage"` adds to the advantage of each token.
    """
    check_name(name, (*DIVERGENCES, "advantage"))
    function = f"distillation {name!r}"
    if name == "advantage":
        check_settings(function, settings, ("coefficient",))
        section = DistilSection.model_validate({**settings, "place": "advantage"})
        gap = inputs.token("teacher_logprobs") - inputs.token("logprobs")
        return Evaluation({"advantages": section.coefficient * gap * inputs.mask})
    if "logits" not in inputs.raw:
        given = {key: value for key, value in settings.items() if key == "coefficient"}
        section = DistilSection.model_validate({**given, "place": "loss", "kind": name})
        check_settings(f"{function} of logprobs", settings, ("coefficient",))
        logprobs = inputs.token("logprobs", gradient=True)
        sampled = section.coefficient * sampled_reverse_kl(logprobs, inputs.token("teacher_logprobs"))
        return mean_over_tokens(sampled, inputs.mask, {"logprobs": logprobs})
    weight = ("teacher_weight",) if name == "jsd" else ()
    check_settings(function, settings, ("top_k", "tail", *weight, "temperature", "coefficient"))
    return _over_vocabulary(name, settings, inputs)


def _over_vocabulary(name: str, settings: Mapping[str, Any], inputs: Inputs) -> Evaluation:
    logits, teacher = inputs.vocabulary("logits", gradient=True), inputs.vocabulary("teacher_logits")
    top_k = settings.get("top_k", logits.shape[-1])
    given = {key: value for key, value in settings.items() if key != "temperature"}
    section = DistilSection.model_validate({**given, "place": "loss", "kind": name, "top_k": top_k})
    temperature = number(settings, "temperature", 1.0)
    if not temperature > 0:
        msg = f"temperature is {temperature}; it must be above 0"
        raise ValueError(msg)
    if section.top_k is not None and section.top_k > logits.shape[-1]:
        msg = f"top_k is {section.top_k}, the vocabulary has {logits.shape[-1]} tokens"
        raise ValueError(msg)
    top = (teacher / temperature).log_softmax(-1).topk(int(top_k), -1)
    per_token = section.coefficient * distillation_loss(
        (logits / temperature).log_softmax(-1).gather(-1, top.indices),
        top.values,
        kind=section.kind,
        tail=section.tail,
        teacher_weight=section.teacher_weight,
    )
    return mean_over_tokens(per_token, inputs.mask, {"logits": logits})
