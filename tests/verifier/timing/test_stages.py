"""What a recorded step tells of its stages: every call in order, the bytes of a real rank, and nothing changed."""

import torch
from verifying import random_ids

from dspark.verifier import Step, Verifier
from dspark.verifier.calls import Recorder
from dspark.verifier.timing import call_bytes, distinct_experts, fill, record_step, rewind


@torch.no_grad()
def test_recorded_calls_repeat_the_step(verifier: Verifier) -> None:
    verifier.prefill([random_ids(verifier.vocab_size, 9)])
    step = Step(verifier, 3)
    step.verifier.ids_T[: step.num_tokens].copy_(random_ids(verifier.vocab_size, 3, seed=1))
    ids, before = (
        step.verifier.ids_T[: step.num_tokens].clone(),
        [tensor.clone() for tensor in verifier.buffers.memory()],
    )
    stages, output = record_step(step)
    for ours, theirs in zip(verifier.buffers.memory(), before, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(step.verifier.ids_T[: step.num_tokens], ids)
    best_T, _ = stages["Head and arg-max"][0]()
    torch.testing.assert_close(best_T, verifier.logits(output.hidden_TD).amax(1))
    again = step()
    assert torch.equal(again.hidden_TD, output.hidden_TD)
    assert int(again.next_id_1) == int(output.next_id_1)


@torch.no_grad()
def test_stages_count_every_layer_and_the_bytes_of_their_weights(verifier: Verifier) -> None:
    config, weights = verifier.config, verifier.weights
    fill(verifier, 4, 100)
    stages, output = record_step(Step(verifier, 4))
    assert output.hidden_TD.isfinite().all()
    layers = range(config.num_hidden_layers)
    num_linear, num_moe = sum(not config.is_latent(i) for i in layers), sum(config.is_moe(i) for i in layers)
    assert len(stages["KDA in-projection"]) == len(stages["KDA verify"]) == num_linear
    assert len(stages["MLA attention"]) == len(layers) - num_linear
    assert len(stages["MoE up"]) == num_moe
    x_bytes = 4 * config.hidden_size * 4
    in_bytes = call_bytes(stages["KDA in-projection"][0], 100)
    linear = weights.linear
    read = (linear.in_LCD, linear.conv_LCJ, linear.a_log_LH, linear.dt_bias_LHE, verifier.buffers.history_LWC)
    assert in_bytes == sum(tensor[0].nbytes for tensor in read) + x_bytes
    experts = distinct_experts(stages)
    assert len(experts) == num_moe
    for call, count in zip(stages["MoE up"], experts, strict=True):
        dispatch = call.args[2]
        assert count == len({int(e) for e in dispatch.experts_P if e >= 0})
        assert call_bytes(call, 100) == call.args[1][0].nbytes * count + x_bytes
    width = config.kv_lora_rank + config.qk_rope_head_dim
    attend = stages["MLA attention"][0]
    assert call_bytes(attend, 100) == attend.args[0].nbytes + 104 * width * 4
    absorb = stages["MLA absorb"][0]
    assert call_bytes(absorb, 100) == absorb.args[0].nbytes + weights.layers[-1].latent.keys_HEC.nbytes
    embed = stages["Embedding and norm"][0]
    assert call_bytes(embed, 100) == x_bytes
    assert call_bytes(stages["KDA commit"][0], 100) > 2 * verifier.buffers.state_LHEF.nbytes


def test_a_recorder_keeps_calls_by_stage_in_order() -> None:
    recorder = Recorder()
    assert recorder("a", max, 1, 2) == 2
    assert recorder("b", sorted, [2, 1], reverse=True) == [2, 1]
    assert recorder("a", max, 3, 4) == 4
    assert [call() for call in recorder["a"]] == [2, 4]
    assert list(recorder) == ["a", "b"]


def test_rewinding_sets_the_length_on_both_sides(verifier: Verifier) -> None:
    rewind(verifier, 17)
    assert (int(verifier.buffers.length_1), verifier.most_tokens) == (17, 17)
