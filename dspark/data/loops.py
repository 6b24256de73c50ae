"""Whether an answer ends in a loop."""

from collections.abc import Sequence

import numpy as np

COPIES, LEAST_TOKENS = 3, 96
_SURE = LEAST_TOKENS * (COPIES - 1) // COPIES
"""Tokens at the end that every loop says once more before."""


def ends_in_loop(ids: Sequence[int]) -> bool:
    """Whether ids end in at least three exact copies of one run, over at least 96 tokens: a token 96 times, a phrase of
    8 tokens 12 times, a paragraph three times.

    Lists, tables and code repeat with differences, or for a few lines; what is counted here is exact, at the very end,
    and so long that the target has nothing else to say. A run of any length counts, since a paragraph may be repeated.
    The last 64 tokens of a loop stand once more where its last run begins one run earlier, so they are looked up first
    (a search of bytes); only where they are found is more compared. Ordinary text costs some microseconds.
    """
    if len(ids) < LEAST_TOKENS:
        return False
    ids_N = np.array(ids, dtype="<i4")
    content, size = ids_N.tobytes(), ids_N.itemsize
    tail, end = content[-_SURE * size :], len(content) - 1
    while (place := content.rfind(tail, 0, end)) >= 0:
        end = place + len(tail) - 1
        period = (len(content) - len(tail) - place) // size
        num_repeated = max((COPIES - 1) * period, LEAST_TOKENS - period)
        if period + num_repeated <= len(ids_N):
            last_M, before_M = ids_N[-num_repeated:], ids_N[-num_repeated - period : -period]
            if np.array_equal(last_M, before_M):
                return True
    return False
