"""What ranks on GPUs do in their tests: sums and gathers against the reference, delays, replays, times."""

import torch
import triton
import triton.language as tl

from dspark.kernels import launch
from dspark.kernels.exchange.kernel import nanoseconds
from dspark.kernels.residual.reference import add_norm, partial_sum
from dspark.verifier.capture import Captured
from dspark.verifier.ranks import Ranks
from dspark.verifier.ranks.devices import LONG_ROWS

WIDTH, EPS = 2560, 1e-6
CALLS_PER_GRAPH, MAX_DELAY_NANOSECONDS = 50, 40_000


@triton.jit
def delay_kernel(delays, place, IS_CHAINED: tl.constexpr):
    """Spin for delays[place] nanoseconds."""
    launch.follow(IS_CHAINED)
    limit = tl.load(delays + place).to(tl.int64)
    began = nanoseconds(0)
    now = began
    while now - began < limit:
        now = nanoseconds(0)


def delay(delays: torch.Tensor, place: int, is_chained: bool) -> None:
    delay_kernel[(1,)](delays, place, num_warps=1, **launch.options(is_chained))


def inputs(num_tokens: int, num_parts: int, seed: int, rank: int) -> dict[str, torch.Tensor]:
    """A rank's own parts, and what all ranks have alike."""
    own = torch.Generator("cuda").manual_seed(seed * 100 + rank)
    shared = torch.Generator("cuda").manual_seed(seed)
    factory = {"dtype": torch.bfloat16, "device": "cuda"}
    return {
        "parts_TKD": torch.empty(num_tokens, num_parts, WIDTH, **factory).normal_(generator=own),
        "weights_TK": torch.rand(num_tokens, num_parts, generator=own, device="cuda"),
        "residual_TD": torch.empty(num_tokens, WIDTH, **factory).normal_(generator=shared),
        "norm_weight_D": torch.empty(WIDTH, **factory).normal_(generator=shared),
    }


def assert_alike(ranks: Ranks, values: torch.Tensor, what: object) -> None:
    found = ranks.gather(values)
    assert all(torch.equal(found[rank], found[0]) for rank in range(ranks.world_size)), f"{what}: bits differ"


def sums_and_gathers(ranks: Ranks, is_chained: bool) -> None:
    """Every window length, and more than one window holds, against the reference; bit-equal over ranks."""
    ranks.reserve(WIDTH)
    for num_tokens in (*range(1, 17), 40, 2 * LONG_ROWS + 5):
        for num_parts in (1, 9):
            given = inputs(num_tokens, num_parts, num_tokens * 10 + num_parts, ranks.rank)
            partials_TRD = ranks.gather(partial_sum(given["parts_TKD"], given["weights_TK"])).transpose(0, 1)
            found = ranks.add_norm(**given, eps=EPS, is_chained=is_chained)
            expected = add_norm(partials_TRD, None, given["residual_TD"], given["norm_weight_D"], EPS)
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right, rtol=2**-6, atol=2**-6)
                assert_alike(ranks, mine, (num_tokens, num_parts))
    for shape in ((9,), (3, 5, 7 * 128), (9, 78592), (17, 2 * WIDTH), (300, 39296)):
        for dtype in (torch.float32, torch.int64):
            values = torch.arange(torch.Size(shape).numel(), device="cuda").to(dtype).view(shape) + ranks.rank
            found = ranks.gather(values, is_chained=is_chained)
            for rank in range(ranks.world_size):
                assert torch.equal(found[rank], values - ranks.rank + rank), (shape, dtype)


def delayed_sums(ranks: Ranks, is_chained: bool, num_calls: int) -> None:
    """Replays of a graph of sums, each after a random delay of this rank: all bit-equal over ranks, and right."""
    ranks.reserve(WIDTH)
    delays = torch.zeros(CALLS_PER_GRAPH, dtype=torch.int64, device="cuda")
    sizes = [1 + place % 16 for place in range(CALLS_PER_GRAPH)]
    calls = [inputs(size, 1 + 8 * (place % 2), place, ranks.rank) for place, size in enumerate(sizes)]

    def chain() -> list[torch.Tensor]:
        outputs = []
        for place, given in enumerate(calls):
            delay(delays, place, is_chained)
            outputs.append(ranks.add_norm(**given, eps=EPS, is_chained=is_chained)[0])
            if place % 7 == 0:
                outputs.append(ranks.gather(outputs[-1][:, :1].float(), is_chained=False)[-1])
        return outputs

    captured = Captured(chain, torch.device("cuda", torch.cuda.current_device()))
    own = torch.Generator("cuda").manual_seed(ranks.rank)
    sums = []
    for number in range(num_calls // CALLS_PER_GRAPH):
        delays.random_(0, MAX_DELAY_NANOSECONDS, generator=own).mul_(delays % 5 == 0)
        for given in calls:
            given["parts_TKD"].normal_(generator=own)
        outputs = captured()
        sums.append(torch.stack([x.view(torch.int16).long().square().sum() for x in outputs]))
        if number % 100 == 0:
            for given, found in zip(calls, [x for x in outputs if x.dtype == torch.bfloat16], strict=True):
                partials_TRD = ranks.gather(partial_sum(given["parts_TKD"], given["weights_TK"])).transpose(0, 1)
                expected, _ = add_norm(partials_TRD, None, given["residual_TD"], given["norm_weight_D"], EPS)
                torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-5)
            ranks.begin_step()
    assert_alike(ranks, torch.stack(sums), "10^5 sums")
    torch.cuda.synchronize()
    ranks.begin_step()
