"""Token-level rules on who may attend to whom; they know no blocks and no backend."""

from xsake.masks.algebra import And, Not, Or
from xsake.masks.bands import Causal, Full, Window
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Coverage
from xsake.masks.description import from_dict, to_dict
from xsake.masks.expression import parse
from xsake.masks.from_function import FromFunction
from xsake.masks.patterns import Chunked, Longformer, Sinks, Strided
from xsake.masks.per_head import PerHead
from xsake.masks.random_cells import BigBird, Random
from xsake.masks.tables import Explicit, Segments

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
