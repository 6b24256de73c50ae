"""Whether an answer ends in a loop."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

COPIES, LEAST_TOKENS = 3, 96


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether ids end in at least three exact copies of one run, over at least 96 tokens: a token 96 times, a phrase of
    8 tokens 12 times, a paragraph three times.

    Lists, tables and code repeat with differences, or for a few lines; what is counted here is exact, at the very end,
    and so long that the target has nothing else to say. A run of any length counts, since a paragraph may be repeated.
    Only where the last token stood before is more compared, so ordinary text costs a fraction of a millisecond.
    """
    ids_N = np.array(ids)
    periods = len(ids_N) - 1 - np.flatnonzero(ids_N[:-1] == ids_N[-1:])
    return any(_is_loop(ids_N, period) for period in reversed(periods.tolist()))


def _is_loop(ids_N: NDArray[np.int64], period: int) -> bool:
    length = max(COPIES * period, LEAST_TOKENS)
    return length <= len(ids_N) and np.array_equal(ids_N[period - length :], ids_N[-length:-period])
