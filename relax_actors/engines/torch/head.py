"""How transformers models compute logits from hidden states, found by comparison with the model's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from relax_actors.algorithms.vocabulary import Head
from relax_actors.engines.torch.packing import Packing
from relax_actors.errors import ConfigError

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""Settings of models that multiply logits by a number, or divide them by it."""
TOLERANCE = 1e-4
"""Largest difference from the model's own logits, relative to the largest one; more in half precision."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """What a model does with the output of its head; see `Head`."""

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: PreTrainedModel,
        hidden_states: Callable[[Tensor, Packing], Tensor] | None,
        device: torch.device,
    ) -> HeadForm:
        """Find out how a model computes its logits.

        Args:
            model: the model; its weights may be random.
            hidden_states: computes the last hidden states of packed tokens; None for a multimodal model, of which only
                the configuration is read.
            device: where it computes, which is not where weights lie that are offloaded.

        Raises:
            ConfigError: the head is no linear layer, or the logits follow from it in an unknown way.
        """
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if type(head).forward is not nn.Linear.forward:  # ranks share subclasses
            raise _unknown(model, f"its output head is {type(head).__name__}, no plain linear layer")
        forms = list(cls._forms(model))
        if hidden_states is None:
            if len(forms) > 1:
                raise _unknown(model, "it scales its logits")
            return forms[0]
        tokens, packing = torch.tensor([[0, 1]], device=device), Packing.of([2], device)
        settings = {"position_ids": packing.positions, "packing": packing, "use_cache": False}
        own = model(input_ids=tokens, **settings).logits[0]
        raw, tolerance = head(hidden_states(tokens, packing))[0], max(TOLERANCE, 4 * torch.finfo(own.dtype).eps)
        for form in forms:
            if (form(raw.double()) - own.double()).abs().max() <= tolerance * own.double().abs().max():
                return form
        raise _unknown(model, "its logits do not follow from its hidden states, head, logit scale and softcap")

    @classmethod
    def _forms(cls, model: PreTrainedModel) -> Iterator[HeadForm]:
        """Yield the forms that a configuration may mean."""
        config = model.config.get_text_config()
        softcap = getattr(config, "final_logit_softcapping", None)
        given = (getattr(config, name, None) for name in SCALES)
        for scale in (1.0, *(s for number in given if number not in (None, 1.0) for s in (number, 1 / number))):
            yield cls(scale, softcap)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the model's logits from those of its head."""
        logits = logits * self.scale
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def head(self, model: PreTrainedModel, barred: Tensor | None, dtype: torch.dtype) -> Head:
        """Return the head of a model of this form, without `barred` `[ids] int64`; float32 is the weights' dtype."""
        layer: nn.Linear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        products = None if dtype == torch.float32 else dtype
        return Head(layer.weight, layer.bias, self.scale, self.softcap, barred, products)


def _unknown(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"model {type(model).__name__} cannot be trained or scored: {reason}. Choose another model, or compute its "
        "logits in relax_actors/engines/torch/head.py"
    )
