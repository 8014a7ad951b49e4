"""Runs the program and answers calls of the tests: `python -I -S -c <exchange and this> <read> <write>`.

The first line is the program. A request is [kind, object, name, arguments, keywords]; an answer is ["value", value] or
["error", type, text].
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
    return ["error", type(error).__name__, str(error)[:1000]]


def main() -> None:
    """Run the program, then answer until the tests have ended."""
    names: dict[str, Any] = {"__name__": "__main__"}
    source, failure = channel.receive(), None
    try:
        exec(compile(source, "program.py", "exec"), names)  # noqa: S102 this is a sandbox for it
    except BaseException as error:  # noqa: BLE001 of the program
        failure = error
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        found = None if failure is None else described(failure)
        if found is None:
            try:
                found = ["value", packed(answer(names, request), hold)]
            except BaseException as error:  # noqa: BLE001 of the program
                found = described(error)
        channel.send(found)


main()
