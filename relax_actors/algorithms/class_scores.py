"""Log-probs of classes from the scores of a reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def class_logprobs(scores: Tensor) -> Tensor:
    """Return the log-probs of the classes, `[..., 2 or classes]`, of scores `[..., classes]`.

    Several scores are logits of a softmax; one is the logit of class 1 of two.
    """
    if scores.shape[-1] == 1:
        return torch.cat([logsigmoid(-scores), logsigmoid(scores)], -1)
    return scores.log_softmax(-1)
