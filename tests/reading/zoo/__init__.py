"""Causal modules in the styles that people write them in: none knows a cache, each is right alone.

ZOO[name]() gives a module in eval mode, an example (ids [2,11] int64 or hidden states [2,11,32])
and the number of its positions. Its weights are wide, since small ones hide errors.
"""

from tests.reading.zoo import mixing, models, positions, products, weights
from tests.reading.zoo.base import OPTIONS, ZOO

__all__ = ["OPTIONS", "ZOO", "mixing", "models", "positions", "products", "weights"]
