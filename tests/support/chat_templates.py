"""Small chat templates with the turn markers and rules of model families that no test dependency brings along."""

SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A system message is added where there is none."""

MISTRAL = (
    "{% macro fail(text) %}{{ raise_exception(text) }}{% endmacro %}"
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(n=0) %}"
    "{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ fail('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}<s>"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ fail('ids have 9 characters') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{% if (m.tool_call_id or '') | length != 9 %}{{ fail('ids have 9 characters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% endif %}{% endfor %}"
)
"""Roles alternate but for calls and their results; ids have 9 characters; tools precede the last user message."""
