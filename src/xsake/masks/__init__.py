"""Token-level attention masks, independent of blocks and backends."""

from xsake.masks.algebra import And, Not, Or, PerHead
from xsake.masks.array_masks import Explicit, Segments
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Coverage
from xsake.masks.from_function import FromFunction
from xsake.masks.parser import parse
from xsake.masks.patterns import (
    BigBird,
    Causal,
    Chunked,
    Full,
    Longformer,
    Random,
    Sinks,
    Strided,
    Window,
)
from xsake.masks.serialization import from_dict, to_dict

__all__ = [
    "AbstractMask",
    "And",
    "BigBird",
    "Causal",
    "Chunked",
    "Coverage",
    "Explicit",
    "FromFunction",
    "Full",
    "Longformer",
    "Not",
    "Or",
    "PerHead",
    "Random",
    "Segments",
    "Sinks",
    "Strided",
    "Window",
    "from_dict",
    "parse",
    "to_dict",
]
