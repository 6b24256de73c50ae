"""Which drafted tokens of many texts one pass of the target verifies, when it may not verify all."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def share(confidences: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many drafted tokens of each text are verified when all texts together may have ``budget`` of them.

    A token survives with probability a_{r,j} = c_{r,0} ... c_{r,j}; the ``budget`` likeliest survivors are taken, of
    equal ones the earlier slot, then the lower row. As a text's survivals never rise, these are the first of its block.

    Lossless for a budget that is fixed beforehand. The choice is what one gets by taking tokens one after the other,
    each time the likeliest next one of any text: c_{r,j} is known before token (r, j) is drawn, so a token is taken
    because of tokens taken before it, never because of itself or of what follows it, which ranks behind it. A budget
    chosen from these very confidences would leak: whether a token is taken would depend on confidences behind it, and
    so on itself. The paper then stops at the first token that does not pay (Algorithm 1); that is not done here.
    Shapes: confidences in [0, 1], one list a text, one number a drafted token. Returns: one count a text.
    Source: DSpark (arXiv 2607.05147), prefix scheduler (specs/dspark.md 6.2).
    """
    assert budget >= 0
    assert all(0 <= confidence <= 1 for row in confidences for confidence in row), "also false for what is no number"
    survivors = sorted(
        (-survival, slot, row)
        for row, of_row in enumerate(confidences)
        for slot, survival in enumerate(accumulate(of_row, mul))
    )
    counts = [0] * len(confidences)
    for _, _, row in survivors[:budget]:
        counts[row] += 1
    return counts
