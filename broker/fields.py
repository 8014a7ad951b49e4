"""Strict decoders of message fields, built once for each type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgpack
import numpy as np

from broker.errors import CodecError

MAX_DEPTH = 64
_LEAVES = frozenset({str, int, float, bool, bytes, type(None)})
"""Types of values that hold no others. Most items of a cell are such, so that no call is made for each."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Location of an array in the store.

    Attributes:
        uri: path of the segment, relative to the store.
        offset: position of the array in the segment, in bytes.
        nbytes: size of the array in bytes.
        dtype: NumPy dtype name.
        shape: shape of the array.
        xxh3_128: checksum of the bytes of the array, hexadecimal.
    """

    uri: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str


Decoder = Callable[[Any, str], Any]


@cache
def decoder_of(expected: Any) -> Decoder:  # noqa: PLR0911 one return for each kind of type
    """Return the cached decoder `(value, path) -> decoded` of an annotation; raises TypeError."""
    if expected is Any:
        return plain
    if dataclasses.is_dataclass(expected) and expected is not TensorRef:
        return _dataclass_decoder(typing.cast("type", expected))
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    # NDArray of NumPy 2.5 is an alias by the statement `type`, from Python 3.12 on.
    if (alias := getattr(origin or expected, "__value__", None)) is not None:
        return decoder_of(alias[args] if args else alias)
    if origin in (types.UnionType, typing.Union):
        return _optional_decoder(args)
    if origin is list:
        return _list_decoder(args[0])
    if origin is dict:
        entry = decoder_of(args[1])
        return _checked(dict, lambda value, at: {_key(k, at): entry(v, f"{at}[{k!r}]") for k, v in value.items()})
    if origin is np.ndarray or expected is np.ndarray:
        return _checked(np.ndarray, lambda value, _: value)
    if expected is float:
        return _float
    if expected in (int, str, bytes, bool, type(None), TensorRef):
        return _checked(expected, lambda value, _: value)
    msg = f"{expected!r} cannot be a field of a message"
    raise TypeError(msg)


def _key(key: Any, at: str) -> str:
    if type(key) is not str:
        msg = f"{at} has a key {str(key)[:80]!r}; keys are strings"
        raise CodecError(msg)
    return key


def check_plain(value: Any, at: str, depth: int = 0) -> None:
    """Raise CodecError if a value has keys other than strings, timestamps, or too deep nesting."""
    if depth > MAX_DEPTH:
        msg = f"{at} is nested deeper than {MAX_DEPTH} levels"
        raise CodecError(msg)
    leaves = _LEAVES if depth < MAX_DEPTH else ()
    if isinstance(value, dict):
        for key, item in value.items():
            if type(item) not in leaves or type(key) is not str:
                check_plain(item, f"{at}.{_key(key, at)[:80]}", depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            if type(item) not in leaves:
                check_plain(item, at, depth + 1)
    elif isinstance(value, msgpack.Timestamp):
        msg = f"{at} is a timestamp; a cell cannot hold timestamps"
        raise CodecError(msg)


def plain(value: Any, _at: str) -> Any:
    """Return plain data unchanged; `open_envelope` has validated it with `check_plain`."""
    return value


def _checked(kind: type, then: Decoder) -> Decoder:
    def decode_checked(value: Any, at: str) -> Any:
        if type(value) is not kind:
            msg = f"{at} is {_kind(value)}, expected {kind.__name__}"
            raise CodecError(msg)
        return then(value, at)

    return decode_checked


def _list_decoder(kind: Any) -> Decoder:
    item = decoder_of(kind)

    def decode_list(value: list[Any], at: str) -> list[Any]:
        if kind in _LEAVES and {*map(type, value)} <= {kind}:
            return value
        return [item(v, f"{at}[{i}]") for i, v in enumerate(value)]

    return _checked(list, decode_list)


def _float(value: Any, at: str) -> float:
    if type(value) is float or type(value) is int:
        return float(value)
    msg = f"{at} is {_kind(value)}, expected float"
    raise CodecError(msg)


def _optional_decoder(args: tuple[Any, ...]) -> Decoder:
    rest = [a for a in args if a is not type(None)]
    if len(rest) != 1:
        msg = f"a message field may be `X | None`, not {args!r}"
        raise TypeError(msg)
    inner = decoder_of(rest[0])
    return lambda value, at: None if value is None else inner(value, at)


def _dataclass_decoder(expected: type) -> Decoder:
    hints = typing.get_type_hints(expected)
    decoders = {f.name: decoder_of(hints[f.name]) for f in dataclasses.fields(expected)}
    required = {f.name for f in dataclasses.fields(expected) if _is_required(f)}

    def decode_dataclass(value: Any, at: str) -> Any:
        if type(value) is not dict:
            msg = f"{at} is {_kind(value)}, expected the fields of {expected.__name__}"
            raise CodecError(msg)
        if not required <= value.keys() or not value.keys() <= decoders.keys():
            missing, extra = sorted(required - value.keys()), sorted(map(str, value.keys() - decoders.keys()))
            msg = f"{at}: missing fields {missing}, unknown fields {str(extra)[:200]}"
            raise CodecError(msg)
        try:
            return expected(**{name: decoders[name](item, f"{at}.{name}") for name, item in value.items()})
        except (ValueError, TypeError, ArithmeticError, LookupError) as error:
            msg = f"{at}: {error}"
            raise CodecError(msg) from error

    return decode_dataclass


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
