"""Head of a critic or a reward model: numbers of a token, in place of the logits of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from relax_actors.engines.megatron.conversion import VALUE_BIAS, NumberHead


class ValueHead(nn.Linear):
    """Linear layer that each tensor-parallel rank holds, in place of GPTModel.output_layer."""

    def __init__(self, config: Any, head: NumberHead) -> None:
        super().__init__(config.hidden_size, head.outputs, bias=VALUE_BIAS in head.names, dtype=config.params_dtype)
        self._precision: torch.dtype = getattr(torch, head.precision)
        self._shares_sequence = bool(config.sequence_parallel)
        for parameter in self.parameters():
            # megatron-core then sums the gradients, each of a part of the sequence, over the tensor-parallel ranks.
            parameter.sequence_parallel = self._shares_sequence  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]  # the interface of ColumnParallelLinear
        self, hidden: Tensor, weight: None = None, runtime_gather_output: None = None
    ) -> tuple[Tensor, None]:
        """Compute the numbers of all positions, `[seq, rows, outputs]`, of `[seq, rows, hidden]`, and no bias.

        With sequence parallelism `hidden` holds this rank's part of the sequence.
        """
        del weight, runtime_gather_output
        bias = None if self.bias is None else self.bias.to(self._precision)
        values = nn.functional.linear(hidden.to(self._precision), self.weight.to(self._precision), bias)
        if self._shares_sequence:
            # Every rank computes the same loss of all values, so no sum over ranks is due in backward.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
