"""The layouts in which drafts come, told apart by what config.json says, and the way from each to ours and back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dspark.errors import CheckpointError, ConfigError

SECTIONS = ("dspark_config", "dflash_config")
"""Mappings into which trainers put fields that runtimes read at the top level."""
READ = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor", "own_tables",
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
"""Fields of a draft's own; the others are a Qwen3 layer's."""
SPELLINGS = {"mask_token_id": ("dspark_noise_token_id",), "is_neox": ("rope_is_neox_style", "is_neox_style")}
"""Other names of a field, beside dspark_NAME."""
SKIPPED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors that speculators leaves in a file now and then and no draft needs."""


class Layout(NamedTuple):
    """A config.json as read: ``tree`` has our fields at the top level, ``name`` and ``reason`` say what it was taken
    for, ``is_neox`` whether rotary pairs are halves (i, i + E/2), as ours, or neighbours (2i, 2i + 1).
    """

    name: str
    reason: str
    tree: dict[str, Any]
    is_neox: bool


def recognise(path: Path, tree: dict[str, Any]) -> Layout:
    """Which layout a config.json has, and its fields in ours: zero-based layer outputs, slots that draft.
    Raises: ConfigError for a network that is no DSpark draft, or where two places say different things.
    Source: specs/dspark.md 2.1 to 2.4.
    """
    if "speculators_model_type" in tree:
        return _from_speculators(path, tree)
    nested = [name for name in SECTIONS if tree.get(name) is not None]
    for name in nested:
        if not isinstance(tree[name], dict):
            raise ConfigError(f"{path}: {name} is {tree[name]!r}, expected a mapping")
    if "dflash_config" in nested:
        _check_specforge(path, tree)
        name, reason = "specforge", "dflash_config.projector_type is 'dspark'"
    else:
        name, reason = "flat", "its fields stand at the top level" if not nested else f"they stand in {nested[0]}"
    flat = {key: value for key, value in tree.items() if key not in SECTIONS}
    flat["is_causal"] = _agreed(
        path, "is_causal", {name: tree[name].get("causal") for name in nested} | {"is_causal": tree.get("is_causal")}
    )
    for key in READ:
        places = {key: tree.get(key)} | {each: tree.get(each) for each in (f"dspark_{key}", *SPELLINGS.get(key, ()))}
        places |= {f"{section}.{key}": tree[section].get(key) for section in nested}
        if key == "target_layer_ids" and (taps := tree.get("eagle_aux_hidden_state_layer_ids")) is not None:
            places["eagle_aux_hidden_state_layer_ids, less 1"] = _less_one(path, taps)
        if key == "sample_from_anchor" and isinstance(is_bonus := tree.get("dspark_bonus_anchor"), bool):
            places["not dspark_bonus_anchor"] = not is_bonus
        if (value := _agreed(path, key, places)) is not None:
            flat[key] = value
    return _with_rope(path, Layout(name, reason, flat, True))


def _from_speculators(path: Path, tree: dict[str, Any]) -> Layout:
    if tree["speculators_model_type"] != "dspark":
        raise ConfigError(f"{path}: speculators_model_type is {tree['speculators_model_type']!r}, expected 'dspark'")
    layers, ids = tree.get("transformer_layer_config"), tree.get("aux_hidden_state_layer_ids")
    if not isinstance(layers, dict):
        raise ConfigError(f"{path}: transformer_layer_config is {layers!r}, expected a mapping")
    if ids is None:
        raise ConfigError(f"{path}: aux_hidden_state_layer_ids is missing; which layers it reads is never guessed")
    is_anchored, block_size = tree.get("sample_from_anchor"), tree.get("block_size")
    if not isinstance(is_anchored, bool):
        hint = "older files mean false, newer ones true: write what the draft was trained with"
        raise ConfigError(f"{path}: sample_from_anchor is {is_anchored!r}; {hint}")
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise ConfigError(f"{path}: block_size is {block_size!r}, expected a number")
    flat = layers | {key: tree[key] for key in READ if key in tree} | {"architectures": ["DSparkDraftModel"]}
    flat |= {"block_size": block_size - (not is_anchored), "target_layer_ids": _less_one(path, ids)}
    flat |= {key: tree[key] for key in ("draft_vocab_size", "quantization_config") if key in tree}
    return _with_rope(path, Layout("speculators", "speculators_model_type is 'dspark'", flat, True))


def _check_specforge(path: Path, tree: dict[str, Any]) -> None:
    """Raises: ConfigError for another draft than DSpark's, or heads that are not what attention_mode says."""
    section = tree["dflash_config"]
    if (kind := section.get("projector_type")) != "dspark":
        raise ConfigError(f"{path}: dflash_config.projector_type is {kind!r}, expected 'dspark': no DSpark draft")
    mode, is_mha = section.get("attention_mode"), tree.get("num_attention_heads") == tree.get("num_key_value_heads")
    if mode is not None and (mode == "mha") != is_mha:
        heads = f"{tree.get('num_attention_heads')} and {tree.get('num_key_value_heads')} heads"
        raise ConfigError(f"{path}: dflash_config.attention_mode is {mode!r} with {heads}; mend the one that is wrong")


def _with_rope(path: Path, layout: Layout) -> Layout:
    """The rotary fields in one form: rope_theta, and rope_scaling where frequencies are stretched."""
    tree = dict(layout.tree)
    ropes = {name: rope for name in ("rope_parameters", "rope_scaling") if (rope := tree.pop(name, None)) is not None}
    for name, rope in ropes.items():
        if not isinstance(rope, dict):
            raise ConfigError(f"{path}: {name} is {rope!r}, expected a mapping")
    thetas = {"rope_theta": tree.get("rope_theta")}
    thetas |= {f"{name}.rope_theta": rope.get("rope_theta") for name, rope in ropes.items()}
    scalings = {name: _scaling(rope) for name, rope in ropes.items()}
    tree["rope_theta"] = _agreed(path, "rope_theta", thetas)
    if (scaling := _agreed(path, "rope_scaling", scalings)) != {"rope_type": "default"}:
        tree["rope_scaling"] = scaling
    is_neox = _agreed(path, "is_neox", {name: tree.get(name) for name in SPELLINGS["is_neox"]})
    if is_neox not in (None, True, False):
        raise ConfigError(f"{path}: rope_is_neox_style is {is_neox!r}, expected true or false")
    return layout._replace(tree=tree, is_neox=is_neox is not False)


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    return {"rope_type": rope.get("type", "default")} | found


def _agreed(path: Path, key: str, places: dict[str, Any]) -> Any:
    """What all places that say anything say; None where none does. Raises: ConfigError where they differ."""
    told = {place: value for place, value in places.items() if value is not None}
    values = list(told.values())
    if any(value != values[0] or type(value) is not type(values[0]) for value in values):
        found = ", ".join(f"{place} {value!r}" for place, value in told.items())
        raise ConfigError(f"{path}: {key} is ambiguous: {found}; keep the one that is right")
    return values[0] if values else None


def _less_one(path: Path, ids: Any) -> list[int]:
    """Our layer ids of ones that count from the embedding's output."""
    if not isinstance(ids, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ConfigError(f"{path}: layer ids are {ids!r}, expected a list of numbers")
    return [each - 1 for each in ids]


def canonical_names(place: Path, stored: Iterable[str]) -> dict[str, str]:
    """Our names of a file's tensors: without the prefix of vLLM's, which all but the head then have, and with today's
    name of the Markov head. Raises: CheckpointError for two tensors that are one. Source: specs/dspark.md 3.2.
    """
    names, found = [name for name in stored if name not in SKIPPED], dict[str, str]()
    prefix = "model." if all(name.startswith("model.") for name in names if name != "lm_head.weight") else ""
    for name in names:
        ours = name.removeprefix(prefix).replace("logit_head.", "markov_head.")
        if found.setdefault(ours, name) != name:
            raise CheckpointError(f"{place}: {found[ours]} and {name} are one tensor; keep the one that is right")
    return found


def speculators_json(tree: dict[str, Any], target: str) -> dict[str, Any]:
    """Our config.json in the layout of the speculators package. ``target``: where that package finds it."""
    own = {key: tree[key] for key in READ if key not in ("target_layer_ids", "num_target_layers", "own_tables")}
    own["block_size"] += not tree["sample_from_anchor"]
    methods = [{"proposal_type": "greedy", "speculative_tokens": tree["block_size"]}]
    verifier = {"name_or_path": target, "architectures": []}
    rest = {"algorithm": "dspark", "proposal_methods": methods, "default_proposal_method": "greedy"}
    layers = {key: value for key, value in tree.items() if key not in (*READ, "architectures", "num_anchors")}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
        "draft_vocab_size": tree["vocab_size"],
        "aux_hidden_state_layer_ids": [each + 1 for each in tree["target_layer_ids"]],
        "sliding_window_non_causal": False,
        "speculators_config": rest | {"verifier": verifier},
        "num_target_layers": tree["num_target_layers"],
        "dtype": "bfloat16",
    } | own
