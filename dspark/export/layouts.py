"""The layouts in which drafts come, told apart by what config.json says, and the way from each to ours and back."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dspark.errors import CheckpointError, ConfigError

SECTIONS = ("dspark_config", "dflash_config", "transformer_layer_config")
"""Mappings into which trainers put fields that runtimes read at the top level; the last is that of speculators."""
OWN = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "sample_from_anchor", "own_tables",
    "num_anchors", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
"""Fields of a draft's own; the others are a Qwen3 layer's."""
SPELLINGS = {"noise_token_id": "mask_token_id", "causal": "is_causal", "bonus_anchor": "sample_from_anchor"}
SPELLINGS |= dict.fromkeys(("rope_is_neox_style", "is_neox_style"), "is_neox")
SPELLINGS |= dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"), "target_layer_ids")
"""Other names of a field, each also with dspark_ before it."""
BOOKKEEPING = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "_name_or_path"}
"""Of a section's, what is about another class than the draft's."""
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
    places: dict[str, Any] = {"": tree} | {f"{name}.": tree[name] for name in SECTIONS if tree.get(name) is not None}
    told: dict[str, dict[str, Any]] = {}
    for place, mapping in places.items():
        if not isinstance(mapping, dict):
            raise ConfigError(f"{path}: {place.rstrip('.')} is {mapping!r}, expected a mapping")
        for key, value in mapping.items():
            if value is not None and key not in SECTIONS and not (place and key in BOOKKEEPING):
                ours, meant = _in_our_words(path, place + key, key.removeprefix("dspark_"), value)
                told.setdefault(ours, {})[place + key] = meant
    flat = {key: _agreed(path, key, values) for key, values in told.items()}
    if "speculators_model_type" in tree:
        _translate_speculators(path, tree, flat)
        name, reason = "speculators", "speculators_model_type is 'dspark'"
    elif "dflash_config." in places:
        _check_specforge(path, tree)
        name, reason = "specforge", "dflash_config.projector_type is 'dspark'"
    else:
        name, reason = "flat", "its fields stand at the top level"
    is_neox = flat.get("is_neox", True)
    return Layout(name, reason, _with_rope(path, flat), is_neox)


def _in_our_words(path: Path, place: str, key: str, value: Any) -> tuple[str, Any]:
    """A field's name and value as we have them. Raises: ConfigError for a value that means nothing."""
    name = SPELLINGS.get(key, key)
    if name in ("is_causal", "is_neox", "sample_from_anchor") and not isinstance(value, bool):
        raise ConfigError(f"{path}: {place} is {value!r}, expected true or false")
    if key == "bonus_anchor":
        return name, not value
    if name == "target_layer_ids" and name != key:  # these count from the embedding's output
        if not isinstance(value, list) or not all(isinstance(each, int) and each is not True for each in value):
            raise ConfigError(f"{path}: {place} is {value!r}, expected a list of numbers")
        return name, [each - 1 for each in value]
    return name, value


def _translate_speculators(path: Path, tree: dict[str, Any], flat: dict[str, Any]) -> None:
    """What is meant otherwise there: block_size counts the row of an anchor that drafts nothing."""
    if tree["speculators_model_type"] != "dspark":
        raise ConfigError(f"{path}: speculators_model_type is {tree['speculators_model_type']!r}, expected 'dspark'")
    if "target_layer_ids" not in flat:
        raise ConfigError(f"{path}: aux_hidden_state_layer_ids is missing; which layers it reads is never guessed")
    is_anchored, block_size = flat.get("sample_from_anchor"), flat.get("block_size")
    if is_anchored is None:
        hint = "older files mean false, newer ones true: write what the draft was trained with"
        raise ConfigError(f"{path}: sample_from_anchor is missing; {hint}")
    if not isinstance(block_size, int) or isinstance(block_size, bool):
        raise ConfigError(f"{path}: block_size is {block_size!r}, expected a number")
    nested = tree.get("transformer_layer_config") or {}
    flat |= {"block_size": block_size - (not is_anchored), "model_type": nested.get("model_type", "qwen3")}


def _check_specforge(path: Path, tree: dict[str, Any]) -> None:
    """Raises: ConfigError for another draft than DSpark's, or heads that are not what attention_mode says."""
    section = tree["dflash_config"]
    if (kind := section.get("projector_type")) != "dspark":
        raise ConfigError(f"{path}: dflash_config.projector_type is {kind!r}, expected 'dspark': no DSpark draft")
    mode, is_mha = section.get("attention_mode"), tree.get("num_attention_heads") == tree.get("num_key_value_heads")
    if mode is not None and (mode == "mha") != is_mha:
        heads = f"{tree.get('num_attention_heads')} and {tree.get('num_key_value_heads')} heads"
        raise ConfigError(f"{path}: dflash_config.attention_mode is {mode!r} with {heads}; mend the one that is wrong")


def _with_rope(path: Path, flat: dict[str, Any]) -> dict[str, Any]:
    """The rotary fields in one form: rope_theta, and rope_scaling where frequencies are stretched."""
    ropes = {name: flat[name] for name in ("rope_parameters", "rope_scaling") if name in flat}
    for name, rope in ropes.items():
        if not isinstance(rope, dict):
            raise ConfigError(f"{path}: {name} is {rope!r}, expected a mapping")
    thetas = {"rope_theta": flat.get("rope_theta")}
    thetas |= {f"{name}.rope_theta": rope.get("rope_theta") for name, rope in ropes.items()}
    scaling = _agreed(path, "rope_scaling", {name: _scaling(path, rope) for name, rope in ropes.items()})
    rest = {key: value for key, value in flat.items() if key not in ropes}
    rest["rope_theta"] = _agreed(path, "rope_theta", thetas)
    return rest if scaling == {"rope_type": "default"} else rest | {"rope_scaling": scaling}


def _scaling(path: Path, rope: dict[str, Any]) -> dict[str, Any]:
    kind = _agreed(path, "rope_type", {name: rope.get(name) for name in ("rope_type", "type")})
    is_whole = rope.get("partial_rotary_factor") == 1
    left_out = {"rope_theta", "type", "rope_type"} | ({"partial_rotary_factor"} if is_whole else set())
    return {"rope_type": "default" if kind is None else kind} | {
        key: value for key, value in rope.items() if key not in left_out
    }


def _agreed(path: Path, key: str, places: dict[str, Any]) -> Any:
    """What all places that say anything say; None where none does. Raises: ConfigError where they differ."""
    told = {place: value for place, value in places.items() if value is not None}
    values = list(told.values())
    if any(value != values[0] or isinstance(value, bool) != isinstance(values[0], bool) for value in values[1:]):
        found = ", ".join(f"{place} {value!r}" for place, value in told.items())
        raise ConfigError(f"{path}: {key} is ambiguous: {found}; keep the one that is right")
    return values[0] if values else None


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
    own = {key: tree[key] for key in OWN if key not in ("target_layer_ids", "own_tables")}
    own["block_size"] += not tree["sample_from_anchor"]
    methods = [{"proposal_type": "greedy", "speculative_tokens": tree["block_size"]}]
    verifier = {"name_or_path": target, "architectures": []}
    rest = {"algorithm": "dspark", "proposal_methods": methods, "default_proposal_method": "greedy"}
    layers = {key: value for key, value in tree.items() if key not in (*OWN, "architectures")}
    return {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layers,
        "draft_vocab_size": tree["vocab_size"],
        "aux_hidden_state_layer_ids": [each + 1 for each in tree["target_layer_ids"]],
        "sliding_window_non_causal": False,
        "speculators_config": rest | {"verifier": verifier},
        "dtype": "bfloat16",
    } | own
