"""The target model against the golden network, and verify-then-commit against decoding one by one."""

from typing import Any

import pytest
import torch
from one_by_one import assert_every_count_agrees

from data.nano.learning import checkpoint_tensors, chosen_experts, initialise, mtp_hidden
from dspark.target.cache import Layout
from dspark.target.config import TargetConfig, parse_target_config
from dspark.target.model import LingModel, tensor_shapes

TOLERANCE = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 0.0, "atol": 1e-4}}


def golden_model(mini: dict[str, Any], dtype: torch.dtype, target_layer_ids: tuple[int, ...] = ()) -> LingModel:
    model = LingModel(parse_target_config(mini["config"]), target_layer_ids, dtype)

    def get(name: str) -> torch.Tensor:
        weight = mini["weights"].pop(name)
        return torch.tensor(weight["int"], dtype=torch.float64).div(weight["den"]).reshape(weight["shape"])

    mini = {**mini, "weights": dict(mini["weights"])}
    model.load_tensors(get)
    assert not mini["weights"], f"unused weights {list(mini['weights'])}"
    return model


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.detach(), torch.as_tensor(expected, dtype=actual.dtype), **TOLERANCE[dtype])


def test_prompt_gives_the_golden_logits_residuals_router_ids_and_memory(ling_golden: dict, dtype: torch.dtype) -> None:
    mini = ling_golden["mini_model"]
    model = golden_model(mini, dtype, (0, 1, 2, 3, 4))
    with chosen_experts(model) as chosen:
        cache, output = model.prefill([torch.tensor(mini["prompt"])])
    close(model.logits(output.last_hidden_ND), mini["logits"], dtype)
    close(output.last_hidden_ND, mini["final_norm_output"], dtype)
    close(output.taps_NLD[-1], mini["residual_stream_last_position_after_each_layer"], dtype)
    close(output.taps_NLD[0], mini["residual_stream_first_position_after_each_layer"], dtype)
    for ids_NK, router in zip(chosen, mini["router"].values(), strict=True):
        assert ids_NK.tolist() == router["ids"]
    for place, layer in enumerate(("0", "2")):
        state_BHEF, history_BWC = cache.memory(place)
        golden = mini["state_after_prompt"][layer]
        close(state_BHEF[0], golden["S"], dtype)
        close(
            history_BWC[0],
            torch.tensor([golden[name] for name in "qkv"], dtype=dtype).transpose(0, 1).flatten(1),
            dtype,
        )
    golden = mini["state_after_prompt"]["1"]
    close(cache.rows_MBJC[0][0], [lat + kr for lat, kr in zip(golden["lat"], golden["kr"], strict=True)], dtype)


def test_decoding_gives_the_golden_logits(ling_golden: dict, dtype: torch.dtype) -> None:
    mini = ling_golden["mini_model"]
    model = golden_model(mini, dtype)
    cache, _ = model.prefill([torch.tensor(mini["prompt"])])
    for token, logits_V in zip(mini["decode_tokens"], mini["decode_logits"], strict=True):
        output = model.verify(torch.tensor([[token]]), cache)
        close(model.logits(output.last_hidden_ND[0]), logits_V, dtype)
        model.commit(cache, torch.tensor([1]))
    cache, _ = model.prefill([torch.tensor(mini["prompt"])])
    output = model.verify(torch.tensor([mini["decode_tokens"]]), cache)
    close(model.logits(output.last_hidden_ND), mini["decode_logits"], dtype)


def test_the_prediction_layer_gives_the_golden_hidden_states(ling_golden: dict, dtype: torch.dtype) -> None:
    mini = ling_golden["mini_model"]
    model = golden_model(mini, dtype)
    last_hidden_ND = torch.tensor(mini["final_norm_output"], dtype=dtype)[:-1]
    with chosen_experts(model) as chosen:
        hidden_ND = mtp_hidden(model, torch.tensor(mini["mtp"]["next_tokens"]), last_hidden_ND, [6])
    close(hidden_ND, mini["mtp"]["hidden_after_final_layernorm"], dtype)
    close(model.logits(hidden_ND), mini["mtp"]["logits"], dtype)
    assert [ids_NK.tolist() for ids_NK in chosen] == [mini["mtp"]["router_ids"]]


def tiny_model(dtype: torch.dtype = torch.float32, **changes: Any) -> LingModel:
    """Five layers (KDA and MLA, low-rank queries, clamps) with weights large enough to matter."""
    values = {
        "vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "head_dim": 8,
        "intermediate_size": 24, "first_k_dense_replace": 1, "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8, "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "layer_group_size": 3, "q_lora_rank": 12,
        "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "rope_theta": 10000.0,
        "kda_lower_bound": -5.0, "short_conv_kernel_size": 4, "rms_norm_eps": 1e-6, "num_nextn_predict_layers": 1,
        "expert_swiglu_limit_list": [0, 0, 0, 0.5, 0.5], "share_expert_swiglu_limit_list": [0, 0, 0.5, 0, 0.5],
    }  # fmt: skip
    model = LingModel(TargetConfig.model_validate(values | changes), (0, 2), dtype)
    initialise(model, torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(8)
    return model


def random_ids(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(29, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def test_ragged_sequences_read_together_equal_each_read_alone() -> None:
    model, ids = tiny_model(), random_ids(1, 37, 5, 16)
    cache, together = model.prefill(ids)
    rows = together.last_hidden_ND.split([len(ids_T) for ids_T in ids])
    for row, ids_T in enumerate(ids):
        alone_cache, alone = model.prefill([ids_T])
        torch.testing.assert_close(rows[row], alone.last_hidden_ND, rtol=1e-5, atol=1e-5)
        for layer in range(2):
            for ours, theirs in zip(cache.memory(layer), alone_cache.memory(layer), strict=True):
                torch.testing.assert_close(ours[row], theirs[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 21])
def test_verify_then_commit_equals_decoding_one_by_one_for_every_count(num_tokens: int) -> None:
    drafts_BT = torch.stack(random_ids(num_tokens, num_tokens, num_tokens))
    assert_every_count_agrees(tiny_model(), random_ids(3, 18, 7), drafts_BT)


def test_the_golden_network_agrees_with_itself_for_every_count(ling_golden: dict) -> None:
    mini = ling_golden["mini_model"]
    model = golden_model(mini, torch.float32)
    prompts = [torch.tensor(mini["prompt"][:length]) for length in (7, 2, 5)]
    drafts_BT = torch.randint(model.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    assert_every_count_agrees(model, prompts, drafts_BT)


@torch.no_grad()
def test_commit_moves_each_sequence_by_its_own_count() -> None:
    model = tiny_model()
    cache, _ = model.prefill(random_ids(3, 18, 7))
    model.verify(torch.ones(3, 4, dtype=torch.int64), cache)
    model.commit(cache, torch.tensor([4, 0, 2]))
    assert cache.lengths == [7, 18, 9]


@torch.no_grad()
def test_verify_equals_reading_the_longer_sequence() -> None:
    model = tiny_model(torch.float64)
    (ids_T,) = random_ids(30)
    _, whole = model.prefill([ids_T])
    cache, _ = model.prefill([ids_T[:20]])
    output = model.verify(ids_T[None, 20:], cache)
    torch.testing.assert_close(output.last_hidden_ND, whole.last_hidden_ND[20:], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(output.taps_NLD, whole.taps_NLD[20:], rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_bfloat16_model_decodes_near_the_float32_model_and_keeps_its_states_in_float32() -> None:
    model, exact = tiny_model(torch.bfloat16, num_experts_per_tok=4), tiny_model(num_experts_per_tok=4)
    exact.load_tensors(checkpoint_tensors(model).__getitem__)
    (ids_T,) = random_ids(12)
    cache, _ = model.prefill([ids_T[:8]])
    hidden_ND = model.verify(ids_T[None, 8:], cache).last_hidden_ND
    model.commit(cache, torch.tensor([3]))
    assert (hidden_ND.dtype, cache.states[0].dtype) == (torch.bfloat16, torch.float32)
    assert model.logits(hidden_ND).dtype == torch.float32
    expected_ND = exact.prefill([ids_T])[1].last_hidden_ND[8:]
    assert (hidden_ND.float() - expected_ND).norm() < 0.1 * expected_ND.norm()


def test_commit_refuses_counts_outside_the_stage() -> None:
    model = tiny_model()
    cache, _ = model.prefill(random_ids(3, 4))
    model.verify(torch.zeros(2, 2, dtype=torch.int64), cache)
    for counts in ([0, 3], [-1, 0], [1]):
        with pytest.raises(ValueError, match=r"in 0\.\.2"):
            model.commit(cache, torch.tensor(counts))
    model.commit(cache, torch.tensor([2, 0]))
    with pytest.raises(ValueError, match=r"in 0\.\.0"):
        model.commit(cache, torch.tensor([1, 0]))


def test_a_checkpoint_holds_the_tensors_that_are_asked_of_one_and_goes_round() -> None:
    model, other = tiny_model(torch.bfloat16), tiny_model(torch.bfloat16)
    tensors = checkpoint_tensors(model)
    specs = tensor_shapes(model.config)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        name: (tuple(spec.shape), spec.dtype) for name, spec in specs.items()
    }
    initialise(other, torch.Generator().manual_seed(1))
    other.load_tensors(tensors.__getitem__)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_every_weight_gets_a_gradient_from_ragged_and_equal_sequences() -> None:
    for lengths in ([5, 20, 9], [17, 17]):
        model = tiny_model()
        ids_N = torch.cat(random_ids(*lengths))
        output = model(ids_N, lengths)
        mtp_ND = mtp_hidden(model, ids_N, output.last_hidden_ND, lengths)
        (model.logits(output.last_hidden_ND).logsumexp(-1).sum() + model.logits(mtp_ND).logsumexp(-1).sum()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().sum() > 0, name


def test_autocast_keeps_the_recurrence_and_the_router_in_float32() -> None:
    model, lengths = tiny_model(), [33, 33]
    ids_N = torch.cat(random_ids(*lengths))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids_N, lengths)
        model.logits(output.last_hidden_ND).sum().backward()
        y_ND, memory = model.model.layers[0].attention(torch.randn(66, 16), Layout.of(lengths, torch.device("cpu")))
        _, weights_NK = model.model.layers[1].mlp.gate(torch.randn(66, 16))
    assert (y_ND.dtype, memory.state_BHEF.dtype, weights_NK.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert output.last_hidden_ND.isfinite().all()
