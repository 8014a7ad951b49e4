"""Tool calls as models of each family write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from relax_actors.data.tool_call import ToolCall, ToolFormat


def write_calls(calls: Sequence[ToolCall], tool_format: ToolFormat) -> str:
    """Write calls as a model of the family does, e.g. for supervised examples.

    Raises:
        ValueError: a name or an argument cannot be written in this format.
    """
    if not calls:
        return ""
    if tool_format is ToolFormat.QWEN_XML:
        return "\n".join(map(_write_xml, calls))
    arguments = "parameters" if tool_format is ToolFormat.LLAMA_JSON else "arguments"
    texts = [_dump({"name": call.name, arguments: call.arguments}) for call in calls]
    if tool_format is ToolFormat.HERMES:
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)
    return "; ".join(texts) if tool_format is ToolFormat.LLAMA_JSON else f"[TOOL_CALLS][{', '.join(texts)}]"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _write_xml(call: ToolCall) -> str:
    lines = [f"<tool_call>\n<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else _dump(value)
        if any(tag in text for tag in ("</parameter>", "</function>", "</tool_call>")):
            msg = f"argument {name!r} of {call.name} contains a tag of the tool call, which this format cannot write"
            raise ValueError(msg)
        lines.append(f"<parameter={name}>\n{text}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])
