"""Tests of a sandboxed program: `python -I -S -c <exchange and this> <read> <write>`.

Standard input is JSON: the program, the tests as Python source, and the name of its entry point or null. The entry
point, and names that a test uses and neither it nor Python defines, are those of the program. Standard output is a line
"true" or "false" for each test, at once.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
from typing import Any

from relax_actors.rewards.code.exchange import Channel, packed, unpacked

channel = Channel(int(sys.argv[1]), int(sys.argv[2]))


class Remote:
    """Object of the program, with calls and attributes; no condition, equal to nothing."""

    def __init__(self, number: int) -> None:
        self.__dict__["_number"] = number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("attribute", self._number, name, [], {})

    def __setattr__(self, name: str, value: Any) -> None:
        message = "tests cannot set attributes of the program"
        raise AttributeError(message)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call it in the sandbox of the program."""
        return ask("call", self._number, "", list(arguments), keywords)

    def __bool__(self) -> bool:
        message = "the program returned an object, which cannot be a condition"
        raise TypeError(message)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def number_of(value: Any) -> int:
    """Return the number of an object of the program."""
    if type(value) is not Remote:
        message = f"{type(value).__name__} cannot be passed to the program"
        raise TypeError(message)
    return int(value.__dict__["_number"])


def ask(kind: str, number: int, name: str, arguments: Any, keywords: Any) -> Any:
    """Ask the program for a value; raises its error: one of Python's own types, else RuntimeError."""
    channel.send([kind, number, name, packed(arguments, number_of), packed(keywords, number_of)])
    reply = channel.receive()
    if reply[0] == "value":
        return unpacked(reply[1], Remote)
    kind_of_error = getattr(builtins, str(reply[1]), None)
    if not (isinstance(kind_of_error, type) and issubclass(kind_of_error, Exception)):
        kind_of_error = RuntimeError
    if issubclass(kind_of_error, (StopIteration, StopAsyncIteration)):
        kind_of_error = RuntimeError  # it would end a loop of the test early
    try:
        error = kind_of_error(str(reply[2]))
    except TypeError:  # such as UnicodeDecodeError, which takes more than a text
        error = RuntimeError(str(reply[2]))
    raise error


def names_of_program(tree: ast.AST) -> set[str]:
    """Return the names that a test uses without defining them."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
    return used - own - set(dir(builtins))


def passes(test: str, entry: str | None) -> bool:
    """Whether a test ends without an exception."""
    try:
        tree = ast.parse(test)
        names: dict[str, Any] = {"__name__": "tests"}
        for name in sorted(names_of_program(tree) | ({entry} if entry else set())):
            names[name] = ask("name", 0, name, [], {})
        exec(compile(tree, "tests.py", "exec"), names)  # noqa: S102 this is a sandbox for it
    except BaseException:  # noqa: BLE001 of the test
        return False
    return True


def main() -> None:
    """Run the tests and report."""
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    given = json.load(sys.stdin)
    channel.send(given["program"])
    for test in given["tests"]:
        os.write(report, b"true\n" if passes(test, given["entry"]) else b"false\n")
    os._exit(0)


main()
