"""The plan counts what is allocated and refuses what does not fit, before anything is allocated."""

from pathlib import Path

import pytest
import torch
from published import FLASH

from dspark.errors import ConfigError
from dspark.kernels import mla
from dspark.kernels.mla import kernel
from dspark.target.config import load_target_config, parse_target_config
from dspark.verifier import Precision, Shard, Verifier, load_mtp, load_weights, make_plan, plan
from dspark.verifier.blocks import num_splits
from dspark.verifier.buffers import allocate_buffers
from dspark.verifier.weights import tensors_of


def test_the_plan_counts_weights_states_and_rows(folder: Path) -> None:
    config = load_target_config(folder)
    for shard in (Shard(), Shard(1, 2)):
        weights = load_weights(folder, shard, torch.float32)
        buffers = allocate_buffers(config, shard, 100, torch.float32)
        made = make_plan(config, shard, 100, torch.float32)
        assert made.weight_bytes == sum(tensor.nbytes for tensor in tensors_of(weights))
        assert made.state_bytes == buffers.state_LHEF.nbytes + buffers.history_LWC.nbytes
        assert made.cache_bytes == buffers.rows_MJC.nbytes + buffers.angles_JE2.nbytes
        assert made.total_bytes == sum(made.parts().values())


@pytest.mark.parametrize("names", [(), ("router",), ("head",), ("router", "head")])
def test_the_plan_counts_what_is_float32(folder: Path, names: tuple[str, ...]) -> None:
    config, precision = load_target_config(folder), Precision(torch.bfloat16, frozenset(names))
    num_gates = sum(map(config.is_moe, range(config.num_hidden_layers)))
    for shard in (Shard(), Shard(1, 2)):
        weights, mtp = load_weights(folder, shard, precision), load_mtp(folder, shard, precision)
        plain = make_plan(config, shard, 100, torch.bfloat16, has_mtp=True)
        made = make_plan(config, shard, 100, precision, has_mtp=True)
        assert made.weight_bytes == sum(tensor.nbytes for tensor in (*tensors_of(weights), *tensors_of(mtp)))
        gates = num_gates + config.is_moe(config.num_hidden_layers)
        more = {"router": 2 * gates * config.num_experts * config.hidden_size, "head": 2 * weights.head_VD.numel()}
        assert made.weight_bytes - plain.weight_bytes == sum(more[name] for name in names)
        assert (made.state_bytes, made.cache_bytes) == (plain.state_bytes, plain.cache_bytes)
        assert made.scratch_bytes == plain.scratch_bytes


def test_flash_fits_where_the_budget_says() -> None:
    config = parse_target_config(FLASH)
    gpu = int(140e9)
    sizes = {ranks: make_plan(config, Shard(0, ranks), 8192 + 256, torch.bfloat16, "cuda") for ranks in (1, 2, 4)}
    assert sizes[4].weight_bytes == pytest.approx(62.8e9, rel=0.01)
    for ranks in (2, 4):
        sizes[ranks].check(gpu, "a GPU")
    with pytest.raises(
        ConfigError, match=r"a GPU has 140.00 GB free, one rank needs .* \(weights 248.* use more ranks"
    ):
        sizes[1].check(gpu, "a GPU")


def test_a_context_that_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text((Path(__file__).parents[2] / "data/nano/config.json").read_text())
    monkeypatch.setattr("dspark.verifier.engine.free_bytes", lambda device: 10**7)
    with pytest.raises(ConfigError, match=r"cpu has 0\.01 GB free"):
        Verifier.load(tmp_path, 1000, device="cpu")


@pytest.mark.parametrize("capacity_tokens", [0, -1, -1000])
def test_room_for_no_token_is_refused(folder: Path, capacity_tokens: int) -> None:
    text = f"capacity_tokens must be at least 1, got {capacity_tokens}"
    with pytest.raises(ConfigError, match=text):
        Verifier(load_weights(folder, Shard(), torch.float32), capacity_tokens)
    with pytest.raises(ConfigError, match=text):
        Verifier.load(folder, capacity_tokens, device="cpu")


def test_free_memory_is_positive(kernel_device: torch.device) -> None:
    assert plan.free_bytes(kernel_device) > 10**8


@pytest.mark.parametrize("num_heads", [4, 8, 16, 32])
@pytest.mark.parametrize("num_rows", [1, 100, 5000, 8388, 8500, 131072])
def test_all_programs_of_latent_attention_run_at_once(num_heads: int, num_rows: int) -> None:
    splits = num_splits(num_rows, num_heads)
    num_blocks = -(-num_rows // mla.BLOCK_ROWS)
    tile, _, _ = kernel.attend_tiles(torch.bfloat16, -(-num_blocks // splits))
    num_tiles = -(-9 * num_heads // tile)
    assert splits * num_tiles <= 132
    assert splits in (num_blocks, 66) or (splits + 1) * num_tiles > 132
