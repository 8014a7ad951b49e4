"""Find the part of a completion that is the answer."""

from __future__ import annotations

import re

_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{([^{}]*)\}")


def final_part(completion: str) -> str:
    r"""Return the content of the last `<answer>` tag, else of the last `\boxed{}`, else the whole completion."""
    found = _TAG.findall(completion) or _BOXED.findall(completion)
    return (found[-1] if found else completion).strip()
