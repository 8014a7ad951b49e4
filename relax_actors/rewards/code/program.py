"""Runs the program for the tests: `python -I -S -c <exchange and this> <read> <write>`.

The first line is the program. A request is [kind, object, name, arguments, keywords]; an answer is ["value", value] or
["error", type, text]. The program is no main module: it does not begin to read its input.
"""

from __future__ import annotations

import sys
from typing import Any

from relax_actors.rewards.code.exchange import Channel, packed, unpacked

channel = Channel(int(sys.argv[1]), int(sys.argv[2]))
objects: list[Any] = []


def hold(value: Any) -> int:
    """Keep an object, and return its number."""
    objects.append(value)
    return len(objects) - 1


def answer(names: dict[str, Any], request: Any) -> Any:
    """Return the value that a request asks for."""
    kind, number, name, arguments, keywords = request
    if kind == "name":
        return names[name]
    if kind == "attribute":
        return getattr(objects[number], name)
    given = unpacked(arguments, objects.__getitem__)
    return objects[number](*given, **unpacked(keywords, objects.__getitem__))


def described(error: BaseException) -> Any:
    """Return the answer that an exception gives."""
    try:
        text = str(error)[:1000]
    except BaseException:  # noqa: BLE001 of the program
        text = ""
    return ["error", type(error).__name__, text]


def main() -> None:
    """Run the program, then answer until the tests have ended."""
    names: dict[str, Any] = {"__name__": "program"}
    source, failure = channel.receive(), None
    try:
        exec(compile(source, "program.py", "exec"), names)  # noqa: S102 this is a sandbox for it
    except BaseException as error:  # noqa: BLE001 of the program
        failure = described(error)
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            channel.send(failure or ["value", packed(answer(names, request), hold)])
        except BaseException as error:  # noqa: BLE001 of the program; what cannot be sent was not sent in part
            channel.send(described(error))


main()
