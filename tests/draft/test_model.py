"""The draft as a whole: context, what a block can see, names, tables, and the mistakes that a forward pass can make."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from agreeing import logits_of
from golden_draft import CASES, DTYPES, GoldenCase, close, golden_case
from torch import Tensor, nn

from dspark.config import DraftConfig
from dspark.draft import backbone
from dspark.draft.backbone import Anchored, DraftAttention
from dspark.draft.model import DraftModel
from dspark.errors import DraftMismatchError
from dspark.kernels.anchor_attention import attend
from dspark.kernels.rotary import rotate_interleaved_pairs


@pytest.fixture
def case(dspark_golden: dict[str, Any]) -> GoldenCase:
    return golden_case(dspark_golden, "mha_vanilla", torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_features_are_deepspecs(dspark_golden: dict[str, Any], dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", dtype)
    context_TD = case.draft.context(case.taps().flatten(0, 1))
    close(context_TD.view(2, 23, -1), case.shared["context_features"])


def _see_the_anchor(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    right = backbone.anchor_attention
    patch.setattr(backbone, "anchor_attention", lambda *given: right(*given[:-1], given[-1] + 1))


def _show(patch: pytest.MonkeyPatch, own_NN: Tensor) -> None:
    """Replace what slots see of slots."""

    def attention(q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor, *places: Tensor) -> Tensor:
        starts_A1, anchors_A1 = (place_A[:, None] for place_A in places)
        context_AT = (torch.arange(len(context_k)) >= starts_A1) & (torch.arange(len(context_k)) < anchors_A1)
        visible_NJ = torch.cat([context_AT.repeat_interleave(5, 0), own_NN], 1)
        return attend(q, torch.cat([context_k, k]), torch.cat([context_v, v]), visible_NJ)

    patch.setattr(backbone, "anchor_attention", attention)


def _see_backwards_only(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    _show(patch, torch.kron(torch.eye(10), torch.ones(5, 5).tril()).bool())


def _see_other_blocks(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    same_NN = torch.kron(torch.eye(2), torch.ones(25, 25)).bool()
    _show(patch, same_NN & case.keep_BA.flatten().repeat_interleave(5))


def _normalise_context_again(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    layers = {layer.self_attn: layer for layer in case.draft.layers}

    def read(memory: Anchored, attention: DraftAttention, *block: Tensor) -> Tensor:
        context_TD = layers[attention].input_layernorm(memory.context_TD)
        context = attention.keys_values(context_TD, memory.rotary)
        return backbone.anchor_attention(block[0], *context, *block[1:], memory.starts_A, memory.anchors_A)

    patch.setattr(Anchored, "__call__", read)


def _positions_one_early(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    blocks = DraftModel.blocks
    patch.setattr(DraftModel, "blocks", lambda draft, ids, positions, *rest: blocks(draft, ids, positions - 1, *rest))


def _previous(shift: int) -> Callable[[GoldenCase, pytest.MonkeyPatch], None]:
    def plant(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
        hidden_AKD = case.forward().hidden_AKD
        patch.setattr(case.draft, "blocks", lambda *_: hidden_AKD)
        case.ids_BT = case.ids_BT[:, (torch.arange(23) + shift).clamp(0, 22)]

    return plant


def _scale_from_hidden(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        for layer in case.draft.layers:
            layer.self_attn.q_norm.weight.mul_(math.sqrt(8 / (16 / 4)))


def _tile_heads(case: GoldenCase, patch: pytest.MonkeyPatch) -> None:
    order = torch.tensor([0, 2, 1, 3])
    with torch.no_grad():
        for layer in case.draft.layers:
            queries, output = layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight
            queries.copy_(queries.view(4, 8, 16)[order].flatten(0, 1))
            output.copy_(output.view(16, 4, 8)[:, order].flatten(1))


MISTAKES: dict[str, Callable[[GoldenCase, pytest.MonkeyPatch], None]] = {
    "context_includes_anchor": _see_the_anchor,
    "taps_through_input_layernorm": _normalise_context_again,
    "tap_index_not_plus_one": lambda case, patch: patch.setattr(case, "states_BTLD", case.states_BTLD.roll(1, 2)),
    "tap_order_reversed": lambda case, patch: patch.setattr(case, "taps", lambda: GoldenCase.taps(case).flip(2)),
    "no_hidden_norm": lambda case, patch: patch.setattr(case.draft, "hidden_norm", nn.Identity()),
    "causal_inside_block": _see_backwards_only,
    "blocks_see_each_other": _see_other_blocks,
    "slot_positions_one_early": _positions_one_early,
    "rope_adjacent_pairs": lambda case, patch: patch.setattr(backbone, "rotate_half_pairs", rotate_interleaved_pairs),
    "scale_from_hidden_over_heads": _scale_from_hidden,
    "markov_previous_is_the_label": _previous(+1),
    "markov_previous_one_early": _previous(-1),
    "kv_heads_tiled": _tile_heads,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_gives_the_wrong_number_and_we_do_not(
    dspark_golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    name = "gqa_vanilla" if mistake == "kv_heads_tiled" else "mha_vanilla"
    case = golden_case(dspark_golden, name, torch.float64)
    wrong = case.expected["wrong"]
    wrong_KV = torch.tensor(wrong[f"y_wrong_{mistake}"]["biased_logits_of_shown_block"]).double()
    sequence, block = wrong["shown_block"]["sequence"], wrong["shown_block"]["block"]
    slots = case.valid_BAK[sequence, block]
    assert (case.logits()[sequence, block] - wrong_KV)[slots].abs().max() > 0.1
    MISTAKES[mistake](case, monkeypatch)
    planted_KV = case.logits()[sequence, block]
    torch.testing.assert_close(planted_KV[slots], wrong_KV[slots], rtol=1e-6, atol=1e-6)


def test_every_mistake_of_the_forward_pass_in_the_golden_file_is_planted(dspark_golden: dict[str, Any]) -> None:
    named = {
        mistake.removeprefix("y_wrong_")
        for name in ("mha_vanilla", "gqa_vanilla")
        for mistake, numbers in dspark_golden["cases"][name]["wrong"].items()
        if "biased_logits_of_shown_block" in numbers
    }
    assert named == set(MISTAKES)


def _gradient_of_block(case: GoldenCase, sequence: int, block: int, inputs: Tensor) -> Tensor:
    output = case.run(inputs)
    assert output.confidence_logits_AK is not None
    logits_BAKV = case.on_grid(logits_of(case.draft, output))
    confidence_BAK = case.on_grid(output.confidence_logits_AK)
    scalar = logits_BAKV[sequence, block].square().sum() + confidence_BAK[sequence, block].sum()
    (gradient,) = torch.autograd.grad(scalar, inputs)
    return gradient


def test_a_block_depends_on_all_taps_before_its_anchor_and_on_no_other(case: GoldenCase) -> None:
    taps_BTLD = case.taps().clone().requires_grad_()
    for sequence, block in ((0, 0), (0, 2), (1, 3)):
        gradient_BTLD = _gradient_of_block(case, sequence, block, taps_BTLD)
        anchor = int(case.anchors_BA[sequence, block])
        reached_BT = gradient_BTLD.abs().amax((2, 3)) > 0
        expected_BT = torch.zeros_like(reached_BT)
        expected_BT[sequence, :anchor] = True
        assert torch.equal(reached_BT, expected_BT)


def test_changing_later_taps_or_another_block_leaves_a_block_unchanged_bit_for_bit(case: GoldenCase) -> None:
    before_BAKV = case.logits()
    anchor = int(case.anchors_BA[0, 2])
    case.states_BTLD = case.states_BTLD.clone()
    case.states_BTLD[0, anchor:] = 7.0
    case.states_BTLD[1] = -3.0
    case.ids_BT = case.ids_BT.clone()
    case.ids_BT[0, anchor + 5 :] = 1
    case.ids_BT[0, :anchor] = 2
    case.anchors_BA = case.anchors_BA.clone()
    case.anchors_BA[0, [0, 1, 3, 4]] = torch.tensor([12, 3, 9, 11])
    case.keep_BA = case.keep_BA.clone()
    case.keep_BA[0, 4] = False
    after_BAKV = case.logits()
    assert torch.equal(before_BAKV[0, 2], after_BAKV[0, 2])
    assert not torch.equal(before_BAKV[0, 3], after_BAKV[0, 3])


def test_a_sequence_says_the_same_alone_and_packed_with_others(case: GoldenCase) -> None:
    packed_BAKV = case.logits()
    for b in range(2):
        alone_AKV = logits_of(case.draft, case.alone(b)[0])
        torch.testing.assert_close(alone_AKV[case.valid_BAK[b]], packed_BAKV[b][case.valid_BAK[b]])


def test_what_a_block_without_context_says_is_finite_and_so_is_its_gradient(case: GoldenCase) -> None:
    case.keep_BA = torch.zeros_like(case.keep_BA)
    logits_BAKV = case.logits()
    assert logits_BAKV.isfinite().all()
    logits_BAKV.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in case.draft.parameters())


def test_compiled_layers_are_whole_graphs_of_any_length_and_say_the_same(
    dspark_golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.compile
    graphs = []
    whole = partial(plain, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, options: whole(run, dynamic=dynamic))
    # On a CPU attention walks over documents, which no graph can hold; on a GPU it is one operation.
    monkeypatch.setattr(backbone, "anchor_attention", lambda q, ck, cv, k, v, *_: q + (ck * cv).mean() + (k * v).mean())
    found = []
    for is_compiled in (False, True):
        case, gradients = golden_case(dspark_golden, "mha_vanilla", torch.float64), []
        if is_compiled:
            case.draft.compile_layers()
        for b in range(2):  # blocks of other numbers, none of them that of the slots in one: it would be a graph's own
            case.anchors_BA, case.keep_BA = case.anchors_BA[:, : 4 - b], case.keep_BA[:, : 4 - b]
            logits_AKV = logits_of(case.draft, case.alone(b)[0])
            gradients.append(torch.autograd.grad(logits_AKV.square().sum(), case.draft.layers[0].mlp.gate_proj.weight))
        found.append((logits_AKV, *(x for pair in gradients for x in pair)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(graphs) == 3  # the first layer, whose input has no gradient, the others, the confidence head


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_and_autocast_stay_near_float32(dspark_golden: dict[str, Any], name: str) -> None:
    exact_BAKV = golden_case(dspark_golden, name, torch.float64).logits()
    case = golden_case(dspark_golden, name, torch.bfloat16)
    low = case.forward()
    other = golden_case(dspark_golden, name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cast = other.forward()
    logits_of(other.draft, cast).square().mean().backward()
    for each, output in ((case, low), (other, cast)):
        assert output.confidence_logits_AK is not None
        assert output.confidence_logits_AK.dtype == torch.float32
        logits_BAKV = each.on_grid(logits_of(each.draft, output))
        assert (logits_BAKV - exact_BAKV)[case.valid_BAK].abs().max() < 0.15


def test_tables_of_another_target_are_refused(case: GoldenCase) -> None:
    head_VD = torch.zeros(61, 16)
    with pytest.raises(DraftMismatchError, match=r"embedding is \[61, 15\].*\[61, 16\]"):
        case.draft.bind(torch.zeros(61, 15), head_VD)
    with pytest.raises(DraftMismatchError, match=r"head is \[60, 16\]"):
        case.draft.bind(head_VD, torch.zeros(60, 16))


def test_bound_tables_are_frozen_shared_and_never_saved(case: GoldenCase) -> None:
    table_VD = torch.zeros(61, 16, dtype=torch.float64, requires_grad=True)
    case.draft.bind(table_VD, table_VD)
    assert case.draft.head_VD is not None
    assert case.draft.head_VD.data_ptr() == table_VD.data_ptr()
    case.logits().sum().backward()
    assert table_VD.grad is None
    assert not any("VD" in name or "lm_head" in name or "embed_tokens" in name for name in case.draft.state_dict())


def test_names_shapes_and_counts_are_those_of_the_published_checkpoint() -> None:
    config = DraftConfig(
        vocab_size=157184,
        hidden_size=2560,
        intermediate_size=6144,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
        max_position_embeddings=262144,
        num_target_layers=42,
        target_layer_ids=(1, 11, 23, 29, 35),
        mask_token_id=156901,
    )
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in DraftModel(config).state_dict().items()}
    assert len(shapes) == 62
    assert sum(math.prod(shape) for shape in shapes.values()) == 558_925_825
    assert shapes["fc.weight"] == (2560, 12800)
    assert shapes["layers.4.self_attn.o_proj.weight"] == (2560, 4096)
    assert shapes["markov_head.markov_w2.weight"] == (157184, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 2816)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_has_a_golden_gradient_and_a_place(dspark_golden: dict[str, Any], name: str) -> None:
    case = golden_case(dspark_golden, name, torch.float32)
    assert set(dict(case.draft.named_parameters())) == set(case.expected["gradients"])


def test_initialising_depends_on_the_generator_alone_and_leaves_no_default(case: GoldenCase) -> None:
    def fresh(seed: int) -> dict[str, Tensor]:
        draft = DraftModel(case.draft.config.model_copy(update={"markov_head_type": "rnn"}))
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.fill_(torch.nan)
        draft.initialise(torch.Generator().manual_seed(seed))
        return draft.state_dict()

    first, second, other = fresh(1), fresh(1), fresh(2)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name])
        if tensor.ndim > 1:
            assert 0.01 < tensor.std() < 0.03
            assert not torch.equal(tensor, other[name])
        else:
            assert torch.equal(tensor, torch.full_like(tensor, 0.0 if name.endswith("bias") else 1.0))


def test_the_markov_table_that_is_returned_is_another_tensor_in_the_same_memory(case: GoldenCase) -> None:
    weight, markov_VR = case.draft.markov_head.markov_w2.weight, case.forward().markov_VR
    assert markov_VR is not weight  # what hooks onto the output does not stay on the weight
    assert markov_VR.data_ptr() == weight.data_ptr()
