"""Whether an answer ends in a loop."""

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
    The last 64 tokens of a loop stand once more where its last run begins one run earlier, so they are looked up first
    (a search of bytes); only where they are found is more compared. Ordinary text costs some microseconds.
    """
    if len(ids) < least_tokens:
        return False
    ids_N = np.array(ids, dtype="<i4")
    content, size = ids_N.tobytes(), ids_N.itemsize
    num_sure = least_tokens * (copies - 1) // copies  # that every loop says once more before
    tail, end = content[-num_sure * size :], len(content) - 1
    while (place := content.rfind(tail, 0, end)) >= 0:
        end = place + len(tail) - 1
        period = (len(content) - len(tail) - place) // size
        num_repeated = max((copies - 1) * period, least_tokens - period)
        if period + num_repeated <= len(ids_N) and period <= (longest_run or period):
            last_M, before_M = ids_N[-num_repeated:], ids_N[-num_repeated - period : -period]
            if np.array_equal(last_M, before_M):
                return True
    return False
