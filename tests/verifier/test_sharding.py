"""The ranks' slices together are the checkpoint, and their partial sums together are the whole model's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from published import FLASH, TINY
from verifying import random_ids

from dspark.errors import ConfigError
from dspark.kernels import head
from dspark.model_folder import Checkpoint
from dspark.target.config import TargetConfig, load_target_config, parse_target_config
from dspark.target.model import tensor_shapes
from dspark.verifier import Shard, Verifier, VerifierWeights, load_weights, random_weights
from dspark.verifier.blocks import Chain, Partial, empty_stage, feed, latent_attention, linear_attention
from dspark.verifier.calls import call
from dspark.verifier.weights import allocate, num_bytes, tensors_of

RANKS = 2


def split(rows: torch.Tensor, *sizes: int) -> Iterator[torch.Tensor]:
    return iter(rows.split(sizes))


def rebuild(ranks: list[VerifierWeights]) -> dict[str, torch.Tensor]:
    """The checkpoint from the layouts that ``weights.py`` describes."""
    config = ranks[0].config
    heads, width = config.num_attention_heads // len(ranks), config.head_dim
    whole = {"model.word_embeddings.weight": ranks[0].embedding_VD, "model.norm.weight": ranks[0].norm_D}
    whole["lm_head.weight"] = torch.cat([rank.head_VD for rank in ranks])
    num_linear = 0
    for index in range(config.num_hidden_layers):
        layers = [rank.layers[index] for rank in ranks]
        found: dict[str, list[torch.Tensor]] = {}

        def add(name: str, part: torch.Tensor, found: dict[str, list[torch.Tensor]] = found) -> None:
            found.setdefault(name, []).append(part)

        for rank, layer in zip(ranks, layers, strict=True):
            latent, inner = layer.latent, heads * width
            if latent is None:
                linear = rank.linear
                parts = split(linear.in_LCD[num_linear], inner, inner, inner, inner, inner, heads)
                for name, part in zip("qkvfgb", parts, strict=True):
                    add(f"attention.{name}_proj.weight", part)
                for name, part in zip("qkv", split(linear.conv_LCJ[num_linear], inner, inner, inner), strict=True):
                    add(f"attention.{name}_conv1d.weight", part[:, None])
                add("attention.A_log", linear.a_log_LH[num_linear])
                add("attention.dt_bias", linear.dt_bias_LHE[num_linear].flatten())
                add("attention.o_proj.weight", linear.out_LDC[num_linear])
                whole[f"model.layers.{index}.attention.o_norm.weight"] = linear.norm_LF[num_linear]
            else:
                shared = config.kv_lora_rank + config.qk_rope_head_dim
                queries = config.q_lora_rank or heads * config.qk_head_dim
                q, kv_a, g = split(latent.in_CD, queries, shared, heads)
                if config.q_lora_rank is None:
                    add("attention.q_proj.weight", q)
                else:
                    add("attention.q_b_proj.weight", latent.q_b_CQ)
                    whole[f"model.layers.{index}.attention.q_a_proj.weight"] = q
                    whole[f"model.layers.{index}.attention.q_a_layernorm.weight"] = latent.q_norm_C
                whole[f"model.layers.{index}.attention.kv_a_proj_with_mqa.weight"] = kv_a
                whole[f"model.layers.{index}.attention.kv_a_layernorm.weight"] = latent.kv_norm_C
                add("attention.kv_b_proj.weight", torch.cat((latent.keys_HEC, latent.values_HFC), 1).flatten(0, 1))
                add("attention.g_proj.weight", g)
                add("attention.dense.weight", latent.out_DC)
            names = ["mlp."]
            if layer.router is not None:
                names = [*(f"mlp.experts.{e}." for e in range(config.num_experts)), "mlp.shared_experts."]
                whole[f"model.layers.{index}.mlp.gate.weight"] = layer.router.gate_XD
                whole[f"model.layers.{index}.mlp.gate.expert_bias"] = layer.router.bias_X
            for expert, name in enumerate(names):
                rows = layer.experts.gate_up_XCD[expert]
                add(f"{name}gate_proj.weight", rows[: len(rows) // 2])
                add(f"{name}up_proj.weight", rows[len(rows) // 2 :])
                add(f"{name}down_proj.weight", layer.experts.down_XDI[expert])
        num_linear += layers[0].latent is None
        for name, parts in found.items():
            is_output = name.endswith(("o_proj.weight", "dense.weight", "down_proj.weight"))
            whole[f"model.layers.{index}.{name}"] = torch.cat(parts, 1 if is_output else 0)
        for name, part in (("input", layers[0].input_norm_D), ("post_attention", layers[0].post_norm_D)):
            whole[f"model.layers.{index}.{name}_layernorm.weight"] = part
    return whole


def test_the_ranks_together_hold_the_whole_checkpoint(folder: Path) -> None:
    config, checkpoint = load_target_config(folder), Checkpoint(folder)
    main = [name for name in checkpoint.names if not is_mtp(name, config)]
    for world_size in (1, RANKS):
        ranks = [load_weights(folder, Shard(rank, world_size), torch.bfloat16) for rank in range(world_size)]
        whole = rebuild(ranks)
        assert sorted(whole) == sorted(main)
        for name in main:
            assert torch.equal(whole[name], checkpoint.get(name)), name


def test_every_tensor_is_placed_exactly_once(folder: Path) -> None:
    config = load_target_config(folder)
    placed: list[str] = []
    allocate(config, Shard(1, RANKS), torch.bfloat16, "meta", lambda _, names: placed.extend(names))
    assert sorted(placed) == sorted(name for name in tensor_shapes(config) if not is_mtp(name, config))


def test_limits_are_those_of_the_layer(folder: Path) -> None:
    config, weights = load_target_config(folder), load_weights(folder, Shard(), torch.float32)
    inf = float("inf")
    for index, layer in enumerate(weights.layers):
        *routed, shared = layer.experts.limits_X.tolist()
        if config.is_moe(index):
            assert set(routed) == {config.routed_limit(index) or inf}
            assert shared == (config.shared_limit(index) or inf)
        else:
            assert (routed, shared) == ([], inf)


def total(partial: Partial) -> torch.Tensor:
    weights_TK = 1 if partial.weights_TK is None else partial.weights_TK[..., None]
    return (partial.parts_TKD * weights_TK).sum(1)


@torch.no_grad()
def test_partial_sums_of_the_ranks_add_up_to_the_whole_models_layer_by_layer(
    folder: Path, kernel_device: torch.device
) -> None:
    def run(verifier: Verifier, x_TD: torch.Tensor) -> list[torch.Tensor]:
        chain = Chain(call, call, verifier.config, verifier.buffers)
        found, num_linear = [], 0
        for index, layer in enumerate(verifier.weights.layers):
            if layer.latent is None:
                staged = empty_stage(x_TD, verifier.weights.linear)
                partial = linear_attention(x_TD, verifier.weights.linear, num_linear, staged, chain)
                num_linear += 1
            else:
                partial = latent_attention(x_TD, layer.latent, index - num_linear, chain)
            found.append(total(partial))
            dense = verifier.dense[len(x_TD)] if layer.router is None else None
            found.append(total(feed(x_TD, layer.router, layer.experts, dense, chain)))
        return found

    ranks = []
    for shard in (Shard(), *(Shard(rank, RANKS) for rank in range(RANKS))):
        ranks.append(Verifier(load_weights(folder, shard, torch.float32, kernel_device), 64))
    x_TD = torch.randn(5, ranks[0].hidden_size, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    whole, *partial = [run(verifier, x_TD) for verifier in ranks]
    for expected_TD, *parts in zip(whole, *partial, strict=True):
        assert expected_TD.abs().max() > 1e-3
        torch.testing.assert_close(sum(parts), expected_TD, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_ranks_choices_merge_to_the_whole_models(folder: Path, kernel_device: torch.device) -> None:
    whole, *ranks = (
        load_weights(folder, shard, torch.float32, kernel_device)
        for shard in (Shard(), *(Shard(rank, RANKS) for rank in range(RANKS)))
    )
    counters = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    hidden_TD = torch.randn(16, whole.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    expected_T = (hidden_TD @ whole.head_VD.T).argmax(1)
    best, ids = zip(*(head.greedy(hidden_TD, rank.head_VD, rank.first_id, counters) for rank in ranks), strict=True)
    assert {int(i) // ranks[0].head_VD.shape[0] for i in expected_T} == set(range(RANKS))
    for num_tokens in range(1, 17):
        drafts_T = torch.cat((expected_T[:1], expected_T))[:num_tokens].clone()
        best_RT, ids_RT = torch.stack(best)[:, :num_tokens], torch.stack(ids)[:, :num_tokens]
        count_1, next_id_1 = head.accept(drafts_T, best_RT.contiguous(), ids_RT.contiguous())
        assert (int(count_1), int(next_id_1)) == (num_tokens, int(expected_T[num_tokens - 1]))


@torch.no_grad()
@pytest.mark.parametrize("world_size", [1, 2])
def test_random_weights_give_finite_unlike_tokens_over_all_layers(world_size: int, kernel_device: torch.device) -> None:
    config = parse_target_config(FLASH)
    small = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 96}
    small |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "num_experts": 16}
    small |= {"num_experts_per_tok": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    config = config.model_copy(update=small | {"v_head_dim": 16})
    verifier = Verifier(random_weights(config, Shard(0, world_size), torch.float32, 0, kernel_device), 64, (0, 40))
    output = verifier.prefill([random_ids(128, 24)])[1]
    assert output.last_hidden_ND.isfinite().all()
    last_ND = output.taps_NLD[:, 1]
    assert 0.5 < last_ND.square().mean().sqrt() < 4
    cosines = torch.nn.functional.cosine_similarity(last_ND[:-1], last_ND[1:])
    assert cosines.abs().mean() < 0.4


def test_random_weights_are_those_of_the_seed_and_the_rank() -> None:
    config = parse_target_config(FLASH).model_copy(
        update={"num_hidden_layers": 6, "hidden_size": 32, "vocab_size": 64, "num_experts": 16}
        | {"moe_intermediate_size": 8, "moe_shared_expert_intermediate_size": 8, "intermediate_size": 32}
    )
    first, again, other = (
        list(tensors_of(random_weights(config, Shard(rank, 2), torch.bfloat16, 3))) for rank in (0, 0, 1)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("name", "values"), [("flash", FLASH), ("tiny", TINY)])
def test_a_rank_of_a_published_model_holds_its_part(
    ling_golden: dict[str, Any], name: str, values: dict[str, Any], world_size: int
) -> None:
    weights = allocate(parse_target_config(values), Shard(0, world_size), torch.bfloat16, "meta")
    held = ling_golden["parameter_counts"][name]["bytes_per_rank"][str(world_size)]["main"]
    held += weights.embedding_VD.nbytes - weights.embedding_VD.nbytes // world_size  # whole on every rank
    limits = sum(layer.experts.limits_X.nbytes for layer in weights.layers)
    assert num_bytes(weights) == held + limits


def is_mtp(name: str, config: TargetConfig) -> bool:
    return name.startswith(f"model.layers.{config.num_hidden_layers}.")


def changed(**changes: int) -> TargetConfig:
    return parse_target_config(FLASH).model_copy(update=changes)


def test_ranks_that_do_not_divide_the_target_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks do not divide num_attention_heads 32, vocab_size 157184"):
        allocate(changed(), Shard(0, 3), torch.bfloat16, "meta")
    with pytest.raises(ConfigError, match="must be moe_intermediate_size 768, got 1536"):
        allocate(changed(num_shared_experts=2), Shard(), torch.bfloat16, "meta")
