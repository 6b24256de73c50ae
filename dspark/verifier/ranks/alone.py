"""What a rank needs of the others, and what it gets when there are none."""

from torch import Tensor

from dspark.kernels import residual


class Ranks:
    """The ranks of one engine as one of them sees them: here the only one, or one of several that is measured alone.
    All ranks make the same calls in the same order.
    """

    rank = 0
    world_size = 1
    """How many processes work together."""

    def reserve(self, width: int) -> None:
        """Make room for sums of this width and wait until all ranks are here, before the first ``add_norm`` of it.
        Raises: RankError naming a rank that does not come.
        """

    def begin_step(self) -> None:
        """Let the others know that this rank goes on, and ``check``. Never waits."""

    def check(self) -> None:
        """Whether what was read from the device counts. Never waits. Raises: RankError naming a rank that is lost."""

    def add_norm(
        self, parts_TKD: Tensor, weights_TK: Tensor | None, residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
        *, is_chained: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``residual.add_norm`` with the parts of all ranks, for any T: the same bits on every rank."""
        return residual.add_norm(parts_TKD, weights_TK, residual_TD, norm_weight_D, eps, is_chained=is_chained)

    def gather(self, values: Tensor, *, is_chained: bool = False) -> Tensor:
        """Every rank's values, of one shape: [world_size, ...], the same on every rank. -0.0 may arrive as 0.0."""
        return values[None]


ALONE = Ranks()
