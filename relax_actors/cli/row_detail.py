"""Print everything about a row: its parts, samples, turns and tokens."""

from __future__ import annotations

import datetime as dt

from relax_actors.counted import counted
from relax_actors.messages.said import said
from relax_actors.monitoring.screen import Screen
from relax_actors.printable import printable, printable_lines
from relax_actors.record.row_detail import Part, RowDetail, SampleDetail, TokenStrip

UNLIKELY = 5
"""Trained tokens with the lowest log-probs that are printed for a sequence."""


def show_detail(row: RowDetail) -> None:
    """Print a row."""
    screen = Screen()
    kept = f", kept by {', '.join(f'record.{rule}' for rule in row.why)}" if row.why else ""
    screen.show(printable(f"{row.row}{kept}"), "bold")
    for role, text in said(row.messages) or [("prompt", row.prompt)]:
        _show_text(screen, role, text)
    if row.answer:
        _show_text(screen, "expected answer", row.answer)
    for medium in row.media:
        screen.show(
            printable(f"  medium: {medium['kind']} {medium['name']}, {medium['size']} bytes, {medium['digest']}")
        )
    screen.show("  parts:")
    for part in row.parts:
        screen.show(printable(f"    {_part(part)}"))
    if row.end:
        screen.show(printable_lines(", ".join(f"{name} {value}" for name, value in row.end.items()), "  "))
    if row.problem:
        screen.show(printable(f"  no samples: {row.problem}"))
    for i, sample in enumerate(row.samples):
        _show_sample(screen, i, sample)


def _part(part: Part) -> str:
    at = dt.datetime.fromtimestamp(part.time, dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    when = f" at {at} UTC" if part.time else ""
    return f"{part.column} by {part.author or 'an unknown actor'}{when}, message {part.sequence}, {part.size} bytes"


def _show_text(screen: Screen, name: str, text: str) -> None:
    if "\n" in text:
        screen.show(printable(f"  {name}:"))
        screen.show(printable_lines(text, "    "))
    else:
        screen.show(printable(f"  {name}: {text}"))


def _show_sample(screen: Screen, number: int, sample: SampleDetail) -> None:
    facts = ["not scored" if sample.reward is None else f"reward {sample.reward:.4g}"]
    facts += [f"{name} {value:.4g}" for name, value in sample.components.items()]
    facts += [] if sample.advantage is None else [f"advantage {sample.advantage:+.4g}"]
    facts += [counted(sample.tokens, "token"), f"{sample.trained} trained", sample.finish_reason]
    facts += [f"version {version}: {counted(count, 'token')}" for version, count in sample.versions.items()]
    facts += [f"{name} {value:.4g}" for name, value in sample.metrics.items()]
    screen.show(printable(f"  sample {number}: {', '.join(facts)}"), "bold")
    for role, text in said(sample.messages) or [("completion", sample.text)]:
        screen.show(printable_lines(f"{role}: {text}", "    "))
    for turn in sample.turns:
        calls = "".join(f", calls {call['name']}" for call in turn.calls)
        screen.show(printable(f"    turn {turn.number} by {turn.author}: {counted(turn.tokens, 'token')}{calls}"))
    for k, strip in enumerate(sample.strips):
        screen.show(printable(f"    tokens{f' of sequence {k}' if len(sample.strips) > 1 else ''}: {_tokens(strip)}"))


def _tokens(strip: TokenStrip) -> str:
    """Return a sequence's number of tokens, means over trained ones, and the least likely."""
    logprobs = strip.numbers.get("logprob", [])
    known = [(value, i) for i, value in enumerate(logprobs) if value is not None and strip.mask[i]]
    if not known:
        return f"{len(strip.ids)}, none trained"
    mean = sum(value for value, _ in known) / len(known)
    least = [f"{_token(strip, i)} {value:.2f}" for value, i in sorted(known)[:UNLIKELY]]
    recorded = zip(strip.numbers.get("entropy", []), strip.mask, strict=False)
    entropies = [value for value, trained in recorded if value is not None and trained]
    entropy = f", mean entropy {sum(entropies) / len(entropies):.3f}" if entropies else ""
    return f"{len(strip.ids)}, mean log-prob {mean:.3f}{entropy}; least likely: {', '.join(least)}"


def _token(strip: TokenStrip, i: int) -> str:
    return f"{strip.texts[i]!r} at {i}" if strip.texts else f"token {strip.ids[i]} at {i}"
