"""Kimi Delta Attention against the golden numbers, and its chunked and staged forms against the recurrence."""

from typing import Any

import pytest
import torch

from dspark.kernels.kda import reference as kda

TOLERANCE = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


@pytest.fixture(params=[torch.float64, torch.float32], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def close(actual: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=dtype), **TOLERANCE[dtype])


def differs(actual: torch.Tensor, wrong: Any) -> None:
    assert (actual - torch.tensor(wrong, dtype=actual.dtype)).abs().max() > 1e-4


def golden_inputs(case: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v, log decay, beta and the initial state of a golden recurrence, as a batch of one."""
    raw = {name: torch.tensor(value, dtype=dtype) for name, value in case.items() if isinstance(value, list)}
    dt_bias_HE = raw["dt_bias"].view(raw["f_raw"].shape[1:])
    decay = kda.log_decay(raw["f_raw"], raw["A_log"], dt_bias_HE, case.get("lower_bound", -5.0))
    inputs = (kda.l2norm(raw["q_raw"]), kda.l2norm(raw["k_raw"]), raw["v"], decay, raw["beta_logit"].sigmoid())
    return [x[None] for x in (*inputs, raw["initial_state"])]


def random_inputs(batch: int, tokens: int, dtype: torch.dtype, decay: float = 1.0) -> list[torch.Tensor]:
    """Inputs of the delta rule with E = 8 and F = 6; ``decay`` scales the log decay's lower bound of -5."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k = kda.l2norm(normal(batch, tokens, 2, 8)), kda.l2norm(normal(batch, tokens, 2, 8))
    log_decay = -5 * decay * (3 * normal(batch, tokens, 2, 8)).sigmoid()
    beta = normal(batch, tokens, 2).sigmoid()
    return [q, k, normal(batch, tokens, 2, 6), log_decay, beta, normal(batch, 2, 8, 6)]


def test_l2norm_adds_eps_under_the_root(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["l2norm"]
    y = kda.l2norm(torch.tensor(case["x"], dtype=dtype), case["eps"])
    close(y, case["y"], dtype)
    differs(y, case["y_wrong_eps_added_to_norm"])
    differs(y, case["y_wrong_eps_as_mean"])


def test_short_conv_has_the_current_token_under_the_last_tap(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["short_conv"]
    x, history = torch.tensor(case["x"], dtype=dtype), torch.tensor(case["history"], dtype=dtype)
    weight_CJ = torch.tensor(case["weight"], dtype=dtype).squeeze(1)
    window_BWC = torch.cat((history, x))[None]
    close(kda.short_conv(window_BWC, weight_CJ)[0], case["y"], dtype)
    differs(kda.short_conv(window_BWC, weight_CJ)[0], case["y_wrong_reversed_taps"])
    close(kda.short_conv(torch.cat((0 * history, x))[None], weight_CJ)[0], case["y_zero_history"], dtype)
    counts_B = torch.arange(6)
    after = kda.history_after(window_BWC.expand(6, -1, -1), counts_B, 3)
    close(after, [case["history"], *case["history_after_each_token"]], dtype)


def test_log_decay_is_the_bounded_sigmoid(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["kda_safe_gate"]
    f, a_log, dt_bias = (torch.tensor(case[name], dtype=dtype) for name in ("f", "A_log", "dt_bias"))
    decay = kda.log_decay(f, a_log, dt_bias.view(2, 4), case["lower_bound"])
    close(decay, case["log_decay"], dtype)
    close(decay.exp(), case["decay"], dtype)
    differs(decay, case["log_decay_wrong_softplus_law"])
    differs(decay, case["log_decay_wrong_clamped_softplus"])


def test_gated_rms_norm_norms_before_a_sigmoid_gate(ling_golden: dict, dtype: torch.dtype) -> None:
    case = ling_golden["gated_rmsnorm"]
    o, weight, gate = (torch.tensor(case[name], dtype=dtype) for name in ("o", "weight", "gate_logit"))
    y = kda.gated_rms_norm(o, weight, gate, case["eps"])
    close(y, case["y"], dtype)
    differs(y, case["y_wrong_silu_gate"])
    differs(y, case["y_wrong_gate_before_norm"])


@pytest.mark.parametrize("form", [kda.recurrence, kda.chunked])
def test_both_forms_give_the_golden_outputs_and_states(ling_golden: dict, dtype: torch.dtype, form: Any) -> None:
    case = ling_golden["kda_recurrence_4tok_2head_dim4"]
    inputs = golden_inputs(case, dtype)
    for actual, name in zip(inputs, ("q_normed", "k_normed", None, "log_decay", "beta"), strict=False):
        if name:
            close(actual[0], case[name], dtype)
    rule = form(*inputs)
    close(rule.o_BTHF[0], case["o"], dtype)
    close(rule.state_BHEF[0], case["state_after_each_token"][-1], dtype)
    close(rule.state_BHEF[0].transpose(-1, -2), case["final_state_v_first"], dtype)
    for count in range(1, 5):
        prefix = form(*(x[:, :count] for x in inputs[:5]), inputs[5])
        close(prefix.state_BHEF[0], case["state_after_each_token"][count - 1], dtype)
        _, k, _, decay, _, state = inputs
        staged = kda.state_after(torch.tensor([count]), k, decay, rule.deltas_BTHF, state)
        close(staged[0], case["state_after_each_token"][count - 1], dtype)
    rule = form(*inputs[:5], torch.zeros_like(inputs[5]))
    close(rule.o_BTHF[0], case["o_zero_initial_state"], dtype)
    close(rule.state_BHEF[0], case["final_state_zero_initial_state"], dtype)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_chunks_of_any_size_give_the_golden_eleven_tokens(
    ling_golden: dict, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.kernels.kda.reference.CHUNK_TOKENS", size)
    case = ling_golden["kda_recurrence_11tok_k4_v3"]
    inputs = golden_inputs(case, dtype)
    rule = kda.chunked(*inputs)
    close(rule.o_BTHF[0], case["o"], dtype)
    close(rule.state_BHEF[0], case["final_state"], dtype)
    close(inputs[3][0].cumsum(0), case["cumulative_log_decay"], dtype)
    for count in (4, 8):
        after = kda.state_after(torch.tensor([count]), inputs[1], inputs[3], rule.deltas_BTHF, inputs[5])
        close(after[0], case[f"state_after_token_{count}"], dtype)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 100])
def test_chunked_equals_the_recurrence_in_float64(tokens: int) -> None:
    inputs = random_inputs(2, tokens, torch.float64)
    for actual, expected in zip(kda.chunked(*inputs), kda.recurrence(*inputs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.001, 0.2, 1.0])
def test_chunked_is_as_near_to_the_truth_in_float32_as_the_recurrence(decay: float) -> None:
    truth = kda.recurrence(*random_inputs(2, 100, torch.float64, decay))
    inputs = [x.float() for x in random_inputs(2, 100, torch.float64, decay)]
    for chunked, single, true in zip(kda.chunked(*inputs), kda.recurrence(*inputs), truth, strict=True):
        error, allowed = ((x.double() - true).norm() / true.norm() for x in (chunked, single))
        assert error < max(4 * allowed, 1e-6)


def test_the_strongest_decay_stays_in_the_range_of_float32() -> None:
    inputs = [x.float() for x in random_inputs(1, 64, torch.float64)]
    inputs[3] = torch.full_like(inputs[3], -5.0).requires_grad_()
    rule = kda.chunked(*inputs)
    expected = kda.recurrence(*inputs)
    torch.testing.assert_close(rule.o_BTHF, expected.o_BTHF, rtol=1e-4, atol=1e-6)
    (grad,) = torch.autograd.grad(rule.o_BTHF.sum(), inputs[3])
    (expected_grad,) = torch.autograd.grad(expected.o_BTHF.sum(), inputs[3])
    torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-6)


def test_small_keys_under_the_strongest_decay_do_not_underflow() -> None:
    q, k, v, decay, beta, state = random_inputs(1, 32, torch.float64)
    inputs = [1e-9 * q, 1e-9 * k, v, torch.full_like(decay, -5.0), beta, 0 * state]
    o_BTHF = kda.chunked(*(x.float() for x in inputs)).o_BTHF.double()
    torch.testing.assert_close(o_BTHF, kda.recurrence(*inputs).o_BTHF, rtol=1e-4, atol=1e-23)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=str)
def test_gradients_of_the_chunked_form_equal_those_of_the_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    def gradients(form: Any) -> list[torch.Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in random_inputs(2, 37, torch.float64)]
        rule = form(*inputs)
        loss = (rule.o_BTHF.square().sum() + rule.state_BHEF.sin().sum()) / 37
        return list(torch.autograd.grad(loss, inputs))

    for actual, expected in zip(gradients(kda.chunked), gradients(kda.recurrence), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_any_staged_count_of_any_row_gives_the_state_of_reading_that_many() -> None:
    q, k, v, decay, beta, state = random_inputs(21, 20, torch.float64)
    rule = kda.chunked(q, k, v, decay, beta, state)
    after = kda.state_after(torch.arange(21), k, decay, rule.deltas_BTHF, state)
    torch.testing.assert_close(after[0], state[0], rtol=0, atol=0)
    for n in range(1, 21):
        row = slice(n, n + 1)
        read = kda.recurrence(*(x[row, :n] for x in (q, k, v, decay, beta)), state[row])
        torch.testing.assert_close(after[row], read.state_BHEF, rtol=1e-11, atol=1e-12)


def test_a_token_with_zero_beta_and_decay_leaves_the_state() -> None:
    inputs = random_inputs(1, 20, torch.float64)
    inputs[3][:, 13:] = 0
    inputs[4][:, 13:] = 0
    short = kda.recurrence(*(x[:, :13] for x in inputs[:5]), inputs[5])
    torch.testing.assert_close(kda.chunked(*inputs).state_BHEF, short.state_BHEF, rtol=1e-11, atol=1e-12)
