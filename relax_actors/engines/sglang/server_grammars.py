"""Grammars of answers in a server's processes, as the transformers engine applies them.

Servers of a run have no tokenizer, so SGLang builds no backend for grammars. By itself it would also report log-probs
of what a grammar leaves of a distribution. Imported by processes of SGLang alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend, InvalidGrammarObject
from sglang.srt.constrained.llguidance_backend import GuidanceGrammar
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from relax_actors.data.grammar import GrammarError, Grammars
from relax_actors.data.tokenizer import Tokenizer

_UNMASKED = "relax_unmasked_logits"


class RunGrammars(BaseGrammarBackend):  # type: ignore[misc]
    """Compiles the grammars of requests, which pass them as `ebnf`.

    `size` is that of the model's vocabulary, which may be larger than that of the tokenizer.
    """

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__()
        self._grammars = Grammars(Tokenizer(folder), size)

    def dispatch_ebnf(self, key_string: str) -> Any:
        """Compile a grammar, in one of the backend's threads."""
        try:
            compiled = self._grammars.compile(key_string)
        except GrammarError as error:
            return InvalidGrammarObject(str(error))
        return RunGrammar(self._grammars.vocabulary, key_string, ll_matcher=compiled.deep_copy())


class RunGrammar(GuidanceGrammar):  # type: ignore[misc]
    """State of one request, which the server aborts if no token continues it.

    llguidance allows stop tokens then, and the answer would look complete.
    """

    def copy(self) -> RunGrammar:
        """Return the state of another request."""
        return RunGrammar(self.llguidance_tokenizer, self.serialized_grammar, ll_matcher=self.ll_matcher.deep_copy())

    @staticmethod
    def fill_vocab_mask_batched(entries: Any, vocab_mask: Any) -> None:
        """Fill the rows of a mask; a state without continuation gets a token that it then refuses."""
        GuidanceGrammar.fill_vocab_mask_batched(entries, vocab_mask)
        for entry in entries:
            matcher = entry.grammar.ll_matcher
            if matcher.is_stopped() and not matcher.is_accepting():
                any_token = np.ones(32 * vocab_mask.shape[1], np.bool_)
                any_token[list(entry.grammar.eos_tokens)] = False
                words = np.packbits(any_token, bitorder="little").view(np.int32)
                vocab_mask[entry.row] = vocab_mask.new_tensor(words)


def register(folder: Path) -> None:
    """Add the grammars of a model folder to a scheduler of SGLang, if this process becomes one."""
    hooks = {
        "constrained.grammar_manager.GrammarManager.__init__": (partial(_add_backend, folder), HookType.AFTER),
        "sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias": (_keep_unmasked, HookType.AROUND),
        "layers.sampler.Sampler.forward": (_report_unmasked, HookType.AROUND),
    }
    for name, (hook, kind) in hooks.items():
        HookRegistry.register(f"sglang.srt.{name}", hook, kind)


def _add_backend(folder: Path, _: None, manager: Any, scheduler: Any) -> None:
    manager.grammar_backend = RunGrammars(folder, scheduler.model_config.vocab_size)


def _keep_unmasked(apply: Any, info: Any, logits: Any) -> None:
    """Mask logits, and keep a copy without the mask for log-probs."""
    mask, info.grammar_mask = info.grammar_mask, None
    apply(info, logits)
    if mask is not None:
        setattr(info, _UNMASKED, logits.clone())
        mask.apply(logits)


def _report_unmasked(forward: Any, sampler: Any, logits_output: Any, info: Any, *rest: Any, **given: Any) -> Any:
    """Sample, and report the log-probs of the whole vocabulary."""
    if (unmasked := vars(info).pop(_UNMASKED, None)) is not None:
        given["logprob_logits"] = unmasked
    return forward(sampler, logits_output, info, *rest, **given)
