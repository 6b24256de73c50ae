"""Checks of a target: its tensors, its template, and that it computes what its config.json says, read or decoded."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dspark.cli.doctor.subject import WORDS, Finding, NotApplicable, Subject, close
from dspark.data.chat import encode_conversation, encode_text
from dspark.data.conversations import Conversation
from dspark.kernels.router.reference import route
from dspark.target.config import LING_ARCHITECTURE, load_target_config
from dspark.target.experts import MixtureOfExperts
from dspark.target.loading import load_tables
from dspark.target.model import LingModel, tensor_shapes
from dspark.types import TargetOutput

NUM_DECODED, LARGE = 6, 64.0
"""Tokens behind a text; and inputs that meet every limit of a SwiGLU."""
NEAR_TIE, BFLOAT16_STEP = 1e-5, 2**-8
"""Scores closer than this may change places by rounding: in float32, and in a router that is rounded to bfloat16."""


def census(subject: Subject) -> Finding:
    """The checkpoint's tensors are those that config.json describes: names, shapes, dtypes, from the headers alone."""
    if subject.facts.architecture != LING_ARCHITECTURE:
        return Finding(True, f"transformers has placed the tensors of {type(subject.target).__name__}")
    expected = tensor_shapes(load_target_config(subject.folder))
    count = f"{len(expected):,} tensors, {sum(tensor.numel() for tensor in expected.values()):,} parameters"
    try:
        subject.checkpoint.check(expected)
    except NotApplicable as reason:
        raise NotApplicable(f"{reason}; by config.json they are {count}") from None
    return Finding(True, f"{count} in {len(subject.checkpoint.files)} files, all as config.json says")


def template(subject: Subject) -> Finding:
    """A fixed conversation comes back from tokenizer and template, as Ling's own words and ids where it is Ling's."""
    golden, chat, facts = WORDS["golden"], subject.chat, subject.facts
    if not chat.tokenizer.chat_template:
        raise NotApplicable("the tokenizer has no chat template: only plain text can be recorded")
    is_ling = facts.architecture == LING_ARCHITECTURE
    messages = golden["messages"] if is_ling else golden["messages"][:2]  # others drop what was thought before
    encoded = encode_conversation(chat, Conversation("doctor", 1, tuple(messages)))
    ids, spans = encoded.ids_T.tolist(), supervised(encoded.ids_T, encoded.loss_mask_T)
    text, said = str(chat.tokenizer.decode(ids)), [str(chat.tokenizer.decode(span)) for span in spans]
    answers = [encode_text(chat, each["content"]) for each in messages[1::2]]
    faults = {
        "the tokenizer reads its own text otherwise": encode_text(chat, text) != ids,
        f"supervised are not the answers but {said}": [span[:-1] for span in spans] != answers,
        f"{text!r} is not what Ling's template writes": is_ling and text != golden["text"],
        f"{ids} are not Ling's ids": is_ling and facts.vocab_size == golden["vocab_size"] and ids != golden["ids"],
    }
    wrong = [fault for fault, is_there in faults.items() if is_there]
    return Finding(not wrong, "; ".join(wrong) or f"{len(ids)} ids come back; supervised: {' | '.join(said)}")


def supervised(ids_T: Tensor, loss_mask_T: Tensor) -> list[list[int]]:
    """The runs of ids to be predicted; the first id never is."""
    borders = (loss_mask_T.diff().nonzero()[:, 0] + 1).tolist()
    return [run_T.tolist() for run_T in ids_T.tensor_split(borders)][1::2]


def swiglu_limits(subject: Subject) -> Finding:
    """Where config.json limits a SwiGLU, the layer does, by a formula of our own and on inputs that meet every limit.
    Source: specs/ling-3.0.md 6.4 (P1: left out, they cost 17 points of HumanEval).
    """
    model, pairs = _ling(subject), dict[int, tuple[Tensor, Tensor]]()
    x_1D = torch.randn(1, model.hidden_size, generator=torch.Generator().manual_seed(0)).to(model.head_VD) * LARGE
    for index, mlp in _mixtures(model).items():
        if any(limits := (model.config.routed_limit(index), model.config.shared_limit(index))):
            pairs[index] = mlp(x_1D)[0], _mixture(mlp, x_1D[0], limits)
    if not pairs:
        raise NotApplicable("config.json limits no layer")
    found, expected = map(torch.stack, zip(*pairs.values(), strict=True))
    return close(subject, found, expected, f"outputs of the limited layers {list(pairs)}")


def _mixture(mlp: MixtureOfExperts, x_D: Tensor, limits: tuple[float | None, float | None]) -> Tensor:
    """What the block has to say about one row; ``limits`` of its routed experts and of the shared one."""
    (ids_1K, weights_1K), shared, sum_D = mlp.gate(x_D[None]), mlp.shared_experts, torch.zeros_like(x_D)
    parts = [(mlp.experts.gate_up_proj[e], mlp.experts.down_proj[e], limits[0]) for e in ids_1K[0]]
    parts.append((torch.cat((shared.gate_proj.weight, shared.up_proj.weight)), shared.down_proj.weight, limits[1]))
    for weight, (in_ID, out_DI, limit) in zip([*weights_1K[0], 1.0], parts, strict=True):
        (gate_I, up_I), bound = (in_ID @ x_D).chunk(2), limit or torch.inf
        sum_D += weight * (out_DI @ (functional.silu(gate_I).clamp(max=bound) * up_I.clamp(-bound, bound)))
    return sum_D


def taps(subject: Subject) -> Finding:
    """Tap i is what layer i hands to the next one, heard at that one's entrance."""
    model, layers = _ling(subject), range(subject.facts.num_layers - 1)
    output, heard = _hear(subject, [model.model.layers[index + 1].input_layernorm for index in layers], *layers)
    wrong = [index for index in layers if not torch.equal(output.taps_NLD[:, index], heard[index][0])]
    return Finding(not wrong, f"taps {wrong} are not their layers' outputs" if wrong else f"{len(layers)} layers")


def head(subject: Subject) -> Finding:
    """The last hidden state is after the final norm, and the checkpoint's head on it gives the logits."""
    model = _ling(subject)
    output, ((given_ND, _),) = _hear(subject, [model.model.norm])
    weight_D = subject.checkpoint.get("model.norm.weight").to(given_ND)
    normed_ND = functional.rms_norm(given_ND, weight_D.shape, weight_D, model.config.rms_norm_eps)
    expected_NV = normed_ND @ load_tables(subject.folder)[1].to(given_ND).T
    return close(subject, model.logits(output.last_hidden_ND), expected_NV, "logits and head x last hidden")


def router_ties(subject: Subject) -> Finding:
    """Experts are picked by scores in float32: picks that are not float64's are near ties. And how near ties are."""
    mixtures, margins, wrong = _mixtures(_ling(subject)), list[Tensor](), list[int]()
    heard = _hear(subject, [mlp.gate for mlp in mixtures.values()])[1]
    for (index, mlp), (x_ND, (ids_NK, _)) in zip(mixtures.items(), heard, strict=True):
        num_groups, num_kept, num_picks, scaling = mlp.gate.law
        logits_NX, bias_X = x_ND.double() @ mlp.gate.weight.double().T, mlp.gate.expert_bias.double()
        best_NJ = route(logits_NX, bias_X, (num_groups, num_kept, num_picks + 1, scaling))[0]
        margins.append(-(logits_NX.sigmoid() + bias_X).gather(1, best_NJ[:, -2:]).diff()[:, 0])
        is_other_N = (ids_NK.sort().values != best_NJ[:, :-1].sort().values).any(1)
        wrong += [index] if (is_other_N & (margins[-1] > NEAR_TIE)).any() else []
    near = torch.cat(margins)
    told = f"smallest margin {near.min():.1g}; {(near < BFLOAT16_STEP).double().mean():.0%} are within bfloat16's step"
    return Finding(not wrong, f"layers {wrong} pick experts that float32 would not" if wrong else told)


def decode_equals_prefill(subject: Subject) -> Finding:
    """Token by token the target says what it says of the whole text at once."""
    target, ids_T, said = subject.tapping(()), subject.ids_T, list[Tensor]()
    whole_TD, cache = target.prefill([ids_T])[1].last_hidden_ND, target.prefill([ids_T[:-NUM_DECODED]])[0]
    for new_id in ids_T[-NUM_DECODED:]:
        said.append(target.verify(new_id.view(1, 1), cache).last_hidden_ND)
        target.commit(cache, torch.ones(1, dtype=torch.int64))
    return close(subject, torch.cat(said), whole_TD[-NUM_DECODED:], f"{NUM_DECODED} decoded states")


def rollback(subject: Subject) -> Finding:
    """After a window of which only the first tokens are kept, the target goes on as if the others had never been."""
    target, ids_T, counts_B = subject.tapping(()), subject.ids_T, torch.arange(NUM_DECODED + 1)
    before_T, ids_B = ids_T[: -len(counts_B)], ids_T[-len(counts_B) :]
    cache = target.prefill([before_T] * len(counts_B))[0]
    target.verify(torch.where(counts_B[:-1] < counts_B[:, None], ids_B[:-1], ids_T[:NUM_DECODED]), cache)
    target.commit(cache, counts_B)
    said_BD = target.verify(ids_B[:, None], cache).last_hidden_ND
    whole_BD = target.prefill([ids_T])[1].last_hidden_ND[len(before_T) :]
    return close(subject, said_BD, whole_BD, f"states after 0 to {NUM_DECODED} of {NUM_DECODED} tokens were kept")


def _hear(subject: Subject, modules: list[Any], *layers: int) -> tuple[TargetOutput, list[Any]]:
    """The target's output over the sample, and of each of some modules, in their order, what it was given and said."""
    heard: list[Any] = []
    hooks = [each.register_forward_hook(lambda _, given, said: heard.append((given[0], said))) for each in modules]
    output = subject.tapping(layers).prefill([subject.ids_T])[1]
    for hook in hooks:
        hook.remove()
    return output, heard


def _ling(subject: Subject) -> LingModel:
    if not isinstance(subject.target, LingModel):
        raise NotApplicable("only Ling-3.0 is looked at so closely")
    return subject.target


def _mixtures(model: LingModel) -> dict[int, MixtureOfExperts]:
    """The mixtures of experts, by their layers."""
    blocks: Any = model.model.layers[: model.num_layers]
    return {index: layer.mlp for index, layer in enumerate(blocks) if isinstance(layer.mlp, MixtureOfExperts)}
