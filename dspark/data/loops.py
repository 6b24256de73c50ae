"""Whether a text ends in a loop."""

from collections.abc import Sequence

import numpy as np

COPIES, LEAST_TOKENS = 3, 96


def ends_in_loop(
    ids: Sequence[int], copies: int = COPIES, least_tokens: int = LEAST_TOKENS, longest_run: int | None = None
) -> bool:
    """Whether ids end in at least ``copies`` exact copies of one run, of ``longest_run`` tokens at most, over at least
    ``least_tokens``: a token 96 times, a phrase of 8 tokens 12 times, a paragraph three times.

    Lists, tables and code repeat with differences, or for a few lines; what is counted here is exact, at the very end,
    and so long that the target has nothing else to say. A run of any length counts, since a paragraph may be repeated.
    Only where the last token stood before is more compared, so ordinary text costs a fraction of a millisecond.
    """
    ids_N = np.array(ids)
    periods = len(ids_N) - 1 - np.flatnonzero(ids_N[:-1] == ids_N[-1:])
    for period in periods[periods <= (longest_run or len(ids_N))].tolist():
        length = max(copies * period, least_tokens)
        if length <= len(ids_N) and np.array_equal(ids_N[period - length :], ids_N[-length:-period]):
            return True
    return False
