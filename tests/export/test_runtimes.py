"""What SGLang's and vLLM's loaders ask of a folder, rule by rule, as their sources were read (specs/dspark.md 2.3, 2.4,
3.3); both packages are too heavy to run here. For every rule a fault that it notices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exported import FIELDS, SMALL, make_draft, tables
from safetensors.torch import load_file

from dspark.export.draft_folder import write_draft
from dspark.files import read_json

Tree = dict[str, Any]
Tensors = dict[str, torch.Tensor]


class Rule(NamedTuple):
    """Whether the loader takes the folder for what it is, and a fault after which it does not."""

    holds: Callable[[Tree, Tensors], bool]
    fault: Callable[[Tree, Tensors], Any]


def sglang(tree: Tree, name: str) -> Any:
    """A field in the order of SGLang's lookups: its own spelling, its section, DFlash's, the top level."""
    for place in (tree, tree.get("dspark_config") or {}, tree.get("dflash_config") or {}):
        found = place.get(f"dspark_{name}" if place is tree else name)
        if found is not None:
            return found
    return tree.get(name)


def backbone(tree: Tree) -> set[str]:
    """Names that both have places for; an unknown one is dropped and a missing one stays random, silently."""
    parts = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    parts += ["input_layernorm", "post_attention_layernorm"]
    layers = {f"layers.{i}.{part}.weight" for i in range(tree["num_hidden_layers"]) for part in parts}
    return layers | {"norm.weight", "fc.weight", "hidden_norm.weight"}


def of_heads(tree: Tree) -> set[str]:
    """Names of the sequential and of the confidence head."""
    extra = {"vanilla": (), "gated": ("gate_proj",), "rnn": ("joint_proj",)}[tree["markov_head_type"]]
    names = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    names |= {f"markov_head.{name}.{kind}" for name in extra for kind in ("weight", "bias")}
    confidence = {f"confidence_head.proj.{kind}" for kind in ("weight", "bias")}
    return names | (confidence if tree["enable_confidence_head"] else set())


SKIPPED = {"embed_tokens.weight", "lm_head.weight"}
SGLANG = {
    "the tag is one of its classes": Rule(
        lambda tree, _: tree["architectures"] in (["LingDSparkModel"], ["Qwen3DSparkModel"], ["DSparkDraftModel"]),
        lambda tree, _: tree.update(architectures=["Qwen3ForCausalLM"]),
    ),
    "gamma is not its fallback of 7": Rule(
        lambda tree, _: sglang(tree, "block_size") == SMALL.block_size, lambda tree, _: tree.pop("block_size")
    ),
    "the rank is above 0": Rule(
        lambda tree, _: (sglang(tree, "markov_rank") or 0) > 0, lambda tree, _: tree.update(markov_rank=0)
    ),
    "the head's type is named": Rule(
        lambda tree, _: sglang(tree, "markov_head_type") in ("vanilla", "gated", "rnn"),
        lambda tree, _: tree.pop("markov_head_type"),
    ),
    "the mask lies in the target's vocabulary": Rule(
        lambda tree, _: 0 <= sglang(tree, "mask_token_id") < tree["vocab_size"],
        lambda tree, _: tree.update(mask_token_id=61),
    ),
    "taps are in the range of the target's layers, whose number is told": Rule(
        lambda tree, _: all(0 <= i < tree.get("num_target_layers", tree["num_hidden_layers"]) for i in taps(tree)),
        lambda tree, _: tree.pop("num_target_layers"),
    ),
    "taps are those of training": Rule(
        lambda tree, _: tuple(taps(tree)) == SMALL.target_layer_ids,
        lambda tree, _: tree.update(target_layer_ids=[2, 5, 7]),
    ),
    "the anchor drafts": Rule(
        lambda tree, _: tree.get("sample_from_anchor", True) is SMALL.sample_from_anchor,
        lambda tree, _: tree.update(sample_from_anchor=False),
    ),
    "every layer looks both ways": Rule(
        lambda tree, _: set(tree.get("layer_types") or ["full_attention"]) == {"full_attention"},
        lambda tree, _: tree["layer_types"].__setitem__(0, "sliding_attention"),
    ),
    "theta is told, nothing is stretched, pairs are halves": Rule(
        lambda tree, _: (
            tree["rope_theta"] == tree["rope_parameters"]["rope_theta"] == SMALL.rope_theta
            and tree["rope_parameters"]["rope_type"] == "default"
            and not tree.get("rope_scaling")
            and tree.get("rope_is_neox_style", True) is True
        ),
        lambda tree, _: tree.update(rope_is_neox_style=False),
    ),
    "heads, biases and epsilon are not its defaults": Rule(
        lambda tree, _: (
            (tree["head_dim"], tree.get("attention_bias", False)) == (SMALL.head_dim, False)
            and {tree["rms_norm_eps"], tree["max_position_embeddings"]} == {1e-6, 64}
            and tree["hidden_act"] == "silu"
        ),
        lambda tree, _: tree.pop("head_dim") and tree.update(head_dim=tree["hidden_size"]),
    ),
    "no backbone tensor is dropped or left random": Rule(
        lambda tree, tensors: {n for n in tensors if not n.startswith(("markov", "conf"))} - SKIPPED == backbone(tree),
        lambda _, tensors: tensors.update({"model.norm.weight": tensors.pop("norm.weight")}),
    ),
    "the heads' tensors match exactly, without a prefix": Rule(
        lambda tree, tensors: {n for n in tensors if n.startswith(("markov", "conf"))} == of_heads(tree),
        lambda _, tensors: tensors.pop("confidence_head.proj.bias"),
    ),
    "fc is as wide as the taps": Rule(
        lambda tree, tensors: tensors["fc.weight"].shape[1] == len(taps(tree)) * tree["hidden_size"],
        lambda tree, _: tree["target_layer_ids"].pop(),
    ),
}
VLLM = {
    "the tag is one of its classes": Rule(
        lambda tree, _: tree["architectures"] == ["Qwen3DSparkModel"],
        lambda tree, _: tree.update(architectures=["LingDSparkModel"]),
    ),
    "taps are the layers' outputs, one above ours": Rule(
        lambda tree, _: (tree.get("eagle_aux_hidden_state_layer_ids") or [i + 1 for i in taps(tree)]) == [2, 5, 7],
        lambda tree, _: tree.update(eagle_aux_hidden_state_layer_ids=[1, 4, 6]),
    ),
    "nothing is causal": Rule(
        lambda tree, _: not tree.get("is_causal") and set(tree["layer_types"]) == {"full_attention"},
        lambda tree, _: tree.update(is_causal=True),
    ),
    "the anchor drafts": Rule(
        lambda tree, _: tree.get("sample_from_anchor", True) and not tree.get("dspark_bonus_anchor"),
        lambda tree, _: tree.update(dspark_bonus_anchor=True),
    ),
    "the vocabulary is whole": Rule(
        lambda tree, tensors: (
            tree.get("draft_vocab_size", tree["vocab_size"]) == tree["vocab_size"] and "d2t" not in tensors
        ),
        lambda tree, _: tree.update(draft_vocab_size=32_000),
    ),
    "the head is one that it computes": Rule(
        lambda tree, _: tree["markov_head_type"] == "vanilla", lambda tree, _: tree.update(markov_head_type="rnn")
    ),
    "with its prefix every name has a place": Rule(
        lambda tree, tensors: (
            {f"model.{n}" for n in tensors} == {f"model.{n}" for n in backbone(tree) | of_heads(tree)}
        ),
        lambda _, tensors: tensors.update({"model.norm.weight": tensors.pop("norm.weight")}),
    ),
    "a confidence head that is promised is there": Rule(
        lambda tree, tensors: tree["enable_confidence_head"] == ("confidence_head.proj.weight" in tensors),
        lambda _, tensors: tensors.pop("confidence_head.proj.weight"),
    ),
    "theta is not its fallback, and nothing comes from the target": Rule(
        lambda tree, _: tree["rope_parameters"] == {"rope_type": "default", "rope_theta": SMALL.rope_theta},
        lambda tree, _: tree["rope_parameters"].update(rope_type="yarn", factor=4),
    ),
}
BOTH = {
    "no key makes it something else": Rule(
        lambda tree, _: not FORBIDDEN & tree.keys(), lambda tree, _: tree.update(partial_rotary_factor=0.5)
    ),
    "it is a Qwen3 config of whole pairs": Rule(
        lambda tree, _: tree["model_type"] == "qwen3", lambda tree, _: tree.update(model_type="bailing_hybrid")
    ),
    "weights are bfloat16 and share no memory": Rule(
        lambda _, tensors: all(tensor.dtype == torch.bfloat16 for tensor in tensors.values()),
        lambda _, tensors: tensors.update({"norm.weight": tensors["norm.weight"].float()}),
    ),
    "no wrapper's prefix is left": Rule(
        lambda _, tensors: not any("_orig_mod" in name or "_fsdp" in name for name in tensors),
        lambda _, tensors: tensors.update({"_orig_mod.norm.weight": tensors["norm.weight"]}),
    ),
}
FORBIDDEN = {"quantization_config", "auto_map", "num_nextn_predict_layers", "partial_rotary_factor", "rope_interleave"}
FORBIDDEN |= {"layer_group_size", "speculators_model_type", "draft_vocab_size"}


def taps(tree: Tree) -> list[int]:
    found: list[int] = sglang(tree, "target_layer_ids")
    return found


@pytest.mark.parametrize(
    ("runtime", "rule"),
    [
        *(("sglang", rule) for rule in [*SGLANG.values(), *BOTH.values()]),
        *(("vllm", rule) for rule in [*VLLM.values(), *BOTH.values()]),
    ],
    ids=[f"sglang-{name}" for name in (*SGLANG, *BOTH)] + [f"vllm-{name}" for name in (*VLLM, *BOTH)],
)
def test_the_loaders_rule_holds_and_a_fault_breaks_it(tmp_path: Path, runtime: Any, rule: Rule) -> None:
    write_draft(make_draft(), tmp_path, FIELDS, runtime=runtime)
    tree, tensors = read_json(tmp_path / "config.json"), load_file(tmp_path / "model.safetensors")
    assert rule.holds(tree, tensors)
    rule.fault(tree, tensors)
    assert not rule.holds(tree, tensors)


def test_deepspec_finds_both_tables_with_the_targets_own_numbers(tmp_path: Path) -> None:
    write_draft(make_draft(), tmp_path, FIELDS, runtime="deepspec")
    tree, tensors = read_json(tmp_path / "config.json"), load_file(tmp_path / "model.safetensors")
    assert tree["architectures"] == ["Qwen3DSparkModel"]
    assert {*tensors} == backbone(tree) | of_heads(tree) | SKIPPED
    for name, table_VD in zip(("embed_tokens.weight", "lm_head.weight"), tables(SMALL), strict=True):
        assert torch.equal(tensors[name].float(), table_VD)
