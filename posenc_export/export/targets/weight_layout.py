"""Memory layout of the weights of linear layers in files that torch runs."""

from torch import Tensor


def laid_out(weight: Tensor) -> Tensor:
    """Return a weight [N,E] with the same values, contiguous along its longer axis.

    A step multiplies each weight by one vector. Once the weights exceed the cache of a core, MKL
    does this up to twice as fast if it reads long contiguous parts of memory (measured for N and E
    of 256 to 4096); products of many tokens take the same time in both layouts.
    """
    if weight.size(0) < weight.size(1):
        return weight
    return weight.t().contiguous().t()
