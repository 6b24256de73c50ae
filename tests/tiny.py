"""Small models on disk for the tests: real file layouts, random weights."""

import json
import math
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dspark.target.config import parse_target_config
from dspark.target.model import tensor_shapes

TEMPLATE = Path(__file__).parent.parent / "data" / "nano" / "chat_template.jinja"
LEARNED_TOKENS = 300
SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|role_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<role>",
    "</role>",
)
TOKEN_ID = {token: LEARNED_TOKENS + index for index, token in enumerate(SPECIAL_TOKENS)}
PAD_TOKEN_ID, STOP_TOKEN_ID = TOKEN_ID["<|endoftext|>"], TOKEN_ID["<|role_end|>"]
VOCAB_SIZE = 320
MASK_TOKEN_ID = VOCAB_SIZE - 1
"""A row of the embedding that no text uses."""

TINY_LING: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "expert_swiglu_limit_list": [0, 0, 0, 0, 0.5, 0.5],
    "share_expert_swiglu_limit_list": [0, 0, 0, 0.5, 0.5, 0.25],
    "layer_group_size": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "rope_theta": 6000000,
    "rope_scaling": None,
    "rope_interleave": True,
    "max_position_embeddings": 512,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "short_conv_kernel_size": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "use_qkv_bias": False,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "eos_token_id": STOP_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    "torch_dtype": "bfloat16",
}


def write_tiny_ling(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A complete Ling-3.0 folder: KDA at layers 0, 1, 3, 4, MLA at 2, 5; ``changes`` go into config.json.

    Weights, tokenizer, template and generation_config.json lie as in the real repositories.
    """
    values = TINY_LING | changes
    generator = torch.Generator().manual_seed(seed)
    specs = tensor_shapes(parse_target_config(values))
    names = sorted(specs, key=partial(_drawing_order, values["num_hidden_layers"]))
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict({name: random_weight(name, specs[name], generator) for name in names}, folder)
    _write_json(folder / "config.json", values)
    _write_json(folder / "generation_config.json", {"eos_token_id": STOP_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID})
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_qwen3(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A model folder of another family (Qwen3, 4 layers) with the same tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    options = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": STOP_TOKEN_ID,
        "pad_token_id": PAD_TOKEN_ID,
        "bos_token_id": None,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(Qwen3Config(**(options | changes))).save_pretrained(folder)
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 learned tokens, then Ling's special tokens; rows 309..319 are unused."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=LEARNED_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["SYSTEM HUMAN ASSISTANT detailed thinking on detailed thinking off", "def add(a, b):\n    return a + b\n"] * 4,
        trainer,
    )
    assert tokenizer.get_vocab_size() == LEARNED_TOKENS
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|startoftext|>",
            "eos_token": "<|role_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
        },
    )
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")


def _drawing_order(num_layers: int, name: str) -> tuple[float, ...]:
    """The embedding, the layers of the main model, norm and head, the MTP layer; what is alike keeps its order."""
    found = re.match(r"model\.layers\.(\d+)\.((?:attention\.|mlp\.)?)(\w+)\.?(\d*)", name)
    if found is None:
        return (-1 if "word_embeddings" in name else num_layers - 0.5,)
    layer, block, part, expert = found.groups()
    first = {"input_layernorm": 1, "post_attention_layernorm": 2}.get(part, 0) if not block else 3
    inner = {"A_log": 1, "dt_bias": 1, "o_norm": 2, "o_proj": 2, "experts": 3, "shared_experts": 4}.get(part, 0)
    return (int(layer), first + (block == "mlp."), inner, int(expert or 0))


def random_weight(name: str, spec: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A weight of a size that keeps activations near 1 and decays between short and long memory."""
    leaf = name.rsplit(".", 2)
    values = torch.randn(spec.shape, generator=generator)
    if leaf[-1] == "A_log":
        values = (torch.rand(spec.shape, generator=generator) * 3 + 1).log()
    elif leaf[-1] == "dt_bias":
        values = values - 1
    elif leaf[-1] == "expert_bias":
        values = values * 0.1
    elif len(spec.shape) == 1:
        values = 1 + values * 0.1
    elif leaf[-2] != "word_embeddings":
        values = values / math.sqrt(spec.shape[-1])
    return values.to(spec.dtype)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
