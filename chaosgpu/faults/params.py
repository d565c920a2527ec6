"""Fault parameters: how a value from JSON, an environment variable or a person becomes a number with a unit.

Values arrive as numbers or as strings (the toolkit's ``env`` configuration gives strings), so every kind takes both and
says in one line which argument was wrong, what it was, and what is allowed.
"""

import dataclasses
import math
import re
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Type, TypeVar

from chaosgpu.changes.errors import BadArgument

T = TypeVar("T")

_SECONDS = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "b": 1, "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4}
_BYTES.update({"tb": 1000**4, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4})
_BITS = {"": 1, "bit": 1, "kbit": 1000, "mbit": 1000**2, "gbit": 1000**3, "tbit": 1000**4}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)\s*([a-z%]*)\s*\Z", re.ASCII | re.IGNORECASE)


def shown(value: Any) -> str:
    """A value as an error shows it: one line, at most 60 characters, whatever was passed in."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 60 else text[:57] + "..."


def _wrong(name: str, value: Any, allowed: str) -> BadArgument:
    return BadArgument(f"{name} is {shown(value)}: {allowed} is allowed")


def quantity(name: str, value: Any, units: Dict[str, Any], allowed: str, low: float, high: float) -> float:
    """A finite number in the base unit, from a number or from text such as ``90s`` or ``10MiB``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _wrong(name, value, allowed)
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if not match or match.group(2).lower() not in units:
            raise _wrong(name, value, allowed)
        number, factor = float(match.group(1)), float(units[match.group(2).lower()])
    else:
        try:
            number, factor = float(value), 1.0
        except OverflowError:
            raise _wrong(name, value, allowed) from None
    number *= factor
    if not math.isfinite(number) or not low <= number <= high:
        raise _wrong(name, value, allowed)
    return number


def number(low: float, high: float, unit: str = "") -> Callable[[str, Any], float]:
    """A plain number in a range. ``unit`` is for the message only."""
    allowed = f"a number from {low:g} to {high:g}{' ' + unit if unit else ''}"
    return lambda name, value: quantity(name, value, {"": 1}, allowed, low, high)


def percent(low: float = 0, high: float = 100) -> Callable[[str, Any], float]:
    """A percentage; ``"20"``, ``20`` and ``"20%"`` are the same."""
    allowed = f"a percentage from {low:g} to {high:g}"
    return lambda name, value: quantity(name, value, {"": 1, "%": 1}, allowed, low, high)


def integer(low: int, high: int) -> Callable[[str, Any], int]:
    """A whole number in a range."""
    allowed = f"a whole number from {low} to {high}"

    def parse(name: str, value: Any) -> int:
        parsed = quantity(name, value, {"": 1}, allowed, low, high)
        if parsed != int(parsed):
            raise _wrong(name, value, allowed)
        return int(parsed)

    return parse


def seconds(low: float, high: float) -> Callable[[str, Any], float]:
    """A time span in seconds, also written ``250ms``, ``90s``, ``5m``, ``1h``."""
    allowed = f'{low:g} to {high:g} seconds (such as 90, "90s", "5m")'
    return lambda name, value: quantity(name, value, _SECONDS, allowed, low, high)


def milliseconds(low: float, high: float) -> Callable[[str, Any], float]:
    """A time span in milliseconds: a bare number is milliseconds, a unit (``50ms``, ``0.1s``) is honoured."""
    units = {unit: factor * 1000 for unit, factor in _SECONDS.items() if unit}
    allowed = f'{low:g} to {high:g} milliseconds (such as 50, "50ms", "0.1s")'
    return lambda name, value: quantity(name, value, {"": 1, **units}, allowed, low, high)


def size_bytes(low: int, high: int = 2**60) -> Callable[[str, Any], int]:
    """A number of bytes, also written ``10GiB`` (1024) or ``10GB`` (1000)."""
    allowed = f'{low} to {high} bytes (such as 1048576, "10GiB", "10GB")'
    return lambda name, value: int(quantity(name, value, _BYTES, allowed, low, high))


def bits_per_second(low: int, high: int = 10**13) -> Callable[[str, Any], int]:
    """A data rate in bits per second, also written ``100mbit``, ``1gbit`` as tc(8) does."""
    allowed = f'{low} to {high} bits per second (such as "100mbit", "1gbit")'
    return lambda name, value: int(quantity(name, value, _BITS, allowed, low, high))


def text(pattern: str = r".+", allowed: str = "text", longest: int = 4096) -> Callable[[str, Any], str]:
    """Text that matches a pattern as a whole. NUL is never allowed: no kernel interface takes it."""
    compiled = re.compile(pattern, re.DOTALL)

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > longest or "\0" in value or not compiled.fullmatch(value):
            raise _wrong(name, value, allowed)
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong(name, value, allowed) from None
        return value

    return parse


def path() -> Callable[[str, Any], str]:
    """An absolute path, as a mount point or file on the node."""
    return text(r"/.*", "an absolute path")


def choice(*words: str) -> Callable[[str, Any], str]:
    """One of a few words."""
    allowed = "one of " + ", ".join(words)

    def parse(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise _wrong(name, value, allowed)
        return value

    return parse


def flag(name: str, value: Any) -> bool:
    """A truth value, also as the texts true and false."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _wrong(name, value, "true or false")


def number_list(top: int) -> Callable[[str, Any], List[int]]:
    """Whole numbers as a list, or as the kernel writes CPU lists: ``0-3,8``."""
    allowed = f'numbers from 0 to {top} as a list or as text such as "0-3,8"'

    def parse(name: str, value: Any) -> List[int]:
        if isinstance(value, int) and not isinstance(value, bool):
            value = [value]
        if isinstance(value, str):
            try:
                value = parse_cpu_list(value, top)
            except ValueError:
                raise _wrong(name, value, allowed) from None
        if (
            not isinstance(value, (list, tuple))
            or not value
            or not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= top for v in value)
        ):
            raise _wrong(name, value, allowed)
        return sorted(set(value))

    return parse


def parse_cpu_list(listed: str, top: int = 65535) -> List[int]:
    """The kernel's list format (``0-3,8``; cpuset(7), "List format") as sorted numbers, else ValueError."""
    numbers: Set[int] = set()
    for part in listed.strip().split(","):
        if not part:
            continue
        low, dash, high = part.partition("-")
        first, last = int(low), int(high) if dash else int(low)
        if not 0 <= first <= last <= top:
            raise ValueError(listed)
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def param(parse: Callable[[str, Any], Any], default: Any = dataclasses.MISSING, doc: str = "") -> Any:
    """A fault's field: how it is parsed, its default, and what it means."""
    metadata = {"parse": parse, "doc": doc}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def build(cls: Type[T], arguments: Dict[str, Any]) -> T:
    """An instance of a fault's dataclass from arguments as they came. None counts as not given.

    Raises BadArgument for an unknown, missing or malformed one.
    """
    known: Dict[str, Any] = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(shown(name) for name in arguments if name not in known)
    if unknown:
        raise BadArgument(f"unknown argument {', '.join(unknown)}: {', '.join(known)} are known")
    given = {}
    for name, spec in known.items():
        value = arguments.get(name)
        if value is not None:
            given[name] = spec.metadata["parse"](name, value)
        elif spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            raise BadArgument(f"{name} is missing: {spec.metadata['doc'] or 'it is required'}")
    return cls(**given)


def exactly_one(arguments: Dict[str, Optional[Any]]) -> Tuple[str, Any]:
    """The one argument of several alternatives that was given; BadArgument when none or more than one was."""
    given = [(name, value) for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        have = " and ".join(name for name, _ in given) or "none"
        raise BadArgument(f"give exactly one of {', '.join(arguments)} (given: {have})")
    return given[0]
