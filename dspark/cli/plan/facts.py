"""What a plan is made from: how much there is to do, how that is known, and how large the models are."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from dspark.cli.mixing import FOLDER
from dspark.cli.record import read_answered
from dspark.config import RunConfig
from dspark.data.chat import ChatFormat, check_length, encode_prompt
from dspark.data.conversations import count_rows
from dspark.data.mixture import REPORT_FILE, TRAIN_FILE, Source, load_mixture, usable
from dspark.decode.engine import SLACK_TOKENS
from dspark.errors import ConfigError, PromptError
from dspark.eval.tasks import num_prompts
from dspark.export import draft_parameter_count
from dspark.model_folder import Checkpoint
from dspark.target.config import LING_ARCHITECTURE, load_target_config
from dspark.target.loading import target_facts
from dspark.target.model import LingModel
from dspark.train.measure import least_bytes
from dspark.verifier.plan import make_plan
from dspark.verifier.weights import DIVIDED, Shard

SAMPLE_ROWS = 200
NUM_WAYS = 1
"""In which every conversation is answered."""


def look_at_prompts(run: RunConfig, chat: ChatFormat) -> tuple[list[torch.Tensor], int, int, int, str]:
    """Encode the first rows of every source, equally many, and count all. Returns: the prompts (int64 [T]); what the
    same rows take as text with their ids, in bytes; how many rows among them cannot be used; the number of
    conversations, and how it is known. Raises: PromptError when a source cannot be read or no such row can be used.
    """
    first, made, how = Path((*run.data.sources, "")[0]), run.record.folder / FOLDER, "counted"
    mixture = load_mixture(first) if first.suffix.lower() in {".yaml", ".yml"} else None
    sources = [Source(path=path, split=run.data.split) for path in run.data.sources]
    if mixture and (made / REPORT_FILE).is_file():
        mixture, sources = None, [Source(path=str(made / TRAIN_FILE))]
    elif mixture:
        sources, how = list(mixture.sources), "the mixture's num_rows" if mixture.num_rows else "at most: rows unmixed"
    most = run.data.max_conversations or sys.maxsize
    each, fates = -(-min(SAMPLE_ROWS, most) // max(1, len(sources))), Counter[str]()
    prompts, text_bytes, refused = list[torch.Tensor](), 0, 0
    for row in chain.from_iterable(islice(usable(source, lambda *_: None, fates), each) for source in sources):
        try:
            ids_T = encode_prompt(chat, row)
            check_length(row.place, len(ids_T) + run.data.max_response_tokens, run.record.max_tokens)
            prompts.append(ids_T)
            text_bytes += len(json.dumps((row.messages, row.text, ids_T.tolist())))
        except PromptError:
            refused += 1
    if not prompts:
        raise PromptError(f"{run.name}: of the first rows of data.sources none can be used; dspark prepare says why")
    total = (mixture and mixture.num_rows) or sum(count_rows(source.path, source.split) for source in sources)
    return prompts, text_bytes, refused if mixture else fates["read"] - len(prompts), min(total, most), how


def expected_amounts(
    run: RunConfig, prompts: Sequence[torch.Tensor], text_bytes: int, number: int, length: float
) -> list[int]:
    """The first five of ``Facts`` for so many conversations whose answers have the mean ``length``, from a sample of
    their prompts and its bytes. Raises: ConfigError for a mean above data.max_response_tokens.
    """
    if length > run.data.max_response_tokens:
        raise ConfigError(f"response_tokens is {length:g}, above data.max_response_tokens; mend one of them")
    sampled, sequences = sum(map(len, prompts)), number * NUM_WAYS
    tokens, new = round(sequences * (sampled / len(prompts) + length)), round(sequences * length)
    return [sequences, tokens, new, new, round(tokens * text_bytes / sampled)]


def exact_amounts(run: RunConfig, origin: dict[str, Any]) -> list[int]:
    """The same when all answers are there. Raises: as ``read_answered``."""
    sequences = read_answered(run, origin, is_leaving_out=True)
    tokens, supervised = sum(len(s.ids_T) for s in sequences), sum(s.num_supervised for s in sequences)
    return [len(sequences), tokens, supervised, 0, 0]


def model_sizes(run: RunConfig, folder: Path, num_gpus: int, device: str) -> list[int]:
    """The last six of ``Facts``, by configs (the target of another family: by its files' headers); nothing is loaded.
    Raises: ConfigError and CheckpointError as the target's folder deserves.
    """
    texts = sum(num_prompts(name, run.eval.max_prompts) for name in run.eval.tasks)
    decoded = texts * len(run.eval.temperatures) * run.eval.turns * run.eval.max_new_tokens
    dtype, num_ranks, num_parameters = getattr(torch, run.target.dtype), 1, draft_parameter_count(run.draft)
    if target_facts(folder).architecture != LING_ARCHITECTURE:
        rank_bytes = target_bytes = Checkpoint(folder).num_parameters * dtype.itemsize
    else:
        config = load_target_config(folder)
        weights = LingModel(config, dtype=dtype, device="meta").state_dict().values()
        rank_bytes = target_bytes = sum(weight.nbytes for weight in weights)
        if device != "cpu":
            sizes = [getattr(config, name) for name in DIVIDED]
            num_ranks = max(n for n in range(1, num_gpus + 1) if not any(size % n for size in sizes))
            capacity = run.record.max_tokens + run.eval.max_new_tokens + SLACK_TOKENS
            rank_bytes = make_plan(config, Shard(0, num_ranks), capacity, dtype, device).total_bytes
    rank_bytes += num_parameters * dtype.itemsize
    return [decoded, target_bytes, least_bytes(run), rank_bytes, num_ranks, num_parameters]
