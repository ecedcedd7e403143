"""How many random numbers a call takes from its generator: always as many, or as many as contents ask for?

In: the kind of a call that draws. Out: whether its shapes alone decide. `poisson` rejects proposals until one fits, so
that another rate leaves the generator elsewhere, and whatever draws next draws something else.
"""

from __future__ import annotations

_BY_SHAPE = frozenset(
    (
        "rand randn randint randlike randnlike randintlike randperm normal normalfunctional uniform random exponential "
        "lognormal cauchy geometric bernoulli multinomial dropout dropout1d dropout2d dropout3d nativedropout "
        "alphadropout featuredropout featurealphadropout scaleddotproductattention lstm gru rnntanh rnnrelu"
    ).split()
)


def takes_as_many_as_it_needs(kind: str) -> bool:
    """May a draw of this kind take more or fewer numbers where it reads other contents? True of what is not known."""
    return kind not in _BY_SHAPE
