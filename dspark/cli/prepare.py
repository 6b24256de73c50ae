"""``dspark prepare``: the target answers the prompts of a run."""

import hashlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from dspark.cli.identity import describe_origin
from dspark.cli.mixing import prompt_sources
from dspark.cli.terminal import DEFAULT_DEVICE, Device, LeaveOut, counted, token_progress
from dspark.config import RunConfig, load_run
from dspark.data.chat import ChatFormat, check_length, encode_prompt
from dspark.data.conversations import encode_each, parse_conversation, stream_rows
from dspark.data.endpoints import EndpointAsker, Patience
from dspark.data.responses import RESPONSES_FILE, Ask, ResponsesHeader, in_batches, known_header, write_responses
from dspark.data.rows import ASKED_FILE, Prompt, Prompts, Row, given_row, open_prompts, rows_of
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.errors import ConfigError, PromptError
from dspark.files import claim, file_sha256
from dspark.target.loading import load_target, locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer, stop_token_ids
from dspark.types import Target

HOW_ASKED = {"endpoints", "served_model", "concurrency", "generation_batch_size"}
"""Of data, what has no part in the prompts."""
ANSWERED = ("stop", "length", "loop", "failed", "retokenised")


def prepare(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    as_given: Annotated[bool, typer.Option("--as-given", help="Take the answers that data.sources hold.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Print the first so many conversations, and ask nothing.")] = 0,
    leave_out_unusable: LeaveOut = False,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Let the target answer data.sources; the responses go to record.folder. Run again to resume.

    data.sources may be one YAML file that describes a mixture (dspark/data/mixture.py); its rows are kept in
    record.folder/prompts. With --as-given the target is not asked. With data.endpoints, servers of the target answer;
    the environment's DSPARK_API_KEY is their key. A failed try is made again; after 30 failures in a row at every
    endpoint, some 20 minutes, the run ends.
    """
    run, console = load_run(config, tuple(overrides or ())), Console(soft_wrap=True, highlight=False)
    folder = locate_target(run.target.path)
    tokenizer, stops, api_key = load_tokenizer(folder), stop_token_ids(folder), read_api_key()
    chats = [ChatFormat(tokenizer, stops, is_thinking) for is_thinking in run.data.thinking]
    sources, path, counts = prompt_sources(run, leave_out_unusable), run.record.folder / RESPONSES_FILE, Counter[str]()
    raw = stream_rows(sources, run.data.split, run.data.max_conversations)
    encoded = encode_each(raw, partial(encode, run, chats, as_given), counts, is_leaving_out=leave_out_unusable)
    origin, is_served = describe_origin(run, folder, tokenizer), bool(run.data.endpoints) and not as_given
    said = [run.data.model_dump(mode="json", exclude=HOW_ASKED), run.record.max_tokens, as_given, leave_out_unusable]
    said += [file_sha256(Path(source)) if Path(source).is_file() else source for source in sources]
    said += [origin["tokenizer_fingerprint"], origin["template_fingerprint"], stops]
    asked_from = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    if show:
        is_answered = path.is_file() and known_header(path, asked_from)
        for row in islice(rows_of(path, Row) if is_answered else chain.from_iterable(encoded), show):
            console.print(describe_row(tokenizer, row))
        return
    with claim(run.record.folder):
        model, known = Row if as_given else Prompt, known_header(path, asked_from)
        is_done, before = known and path.is_file(), known.prompts_sha256 if known else None
        there = Path(os.devnull) if is_done else path.with_name(ASKED_FILE)  # when done, nothing is left to be asked
        prompts = Prompts(there, model) if is_done else open_prompts(there, counted(encoded, "prompts"), model, before)
        made = {"prompts_sha256": prompts.sha256, "num_prompts": len(prompts), "num_left_out": counts["left out"]}
        header = ResponsesHeader(
            **origin | (known.model_dump(include=set(made)) if known and not counts else made),
            asked_from=asked_from,
            answers="given" if as_given else "target",
            temperatures=() if as_given else run.data.temperatures,
            max_response_tokens=run.data.max_response_tokens,
            generation_batch_size=1 if is_served else run.data.generation_batch_size,
            served_as=f"{run.data.endpoint_route} of {run.data.served_model}" if is_served else None,
            stop_token_ids=stops,
            seed=run.seed,
        )
        failures = list[str]()
        with token_progress("responses", header.num_prompts) as on_rows:
            ask = in_process(run, folder, prompts, header, device)
            if is_served:
                on_failure, facts = partial(tell_failure, failures, on_rows), target_facts(folder)
                ids, jitter = (facts.vocab_size, facts.eos_token_id), random.Random(run.seed)
                patience = Patience(300 + run.data.max_response_tokens / 5)  # a queue, then five tokens a second
                served = partial(EndpointAsker, run.data, chats[0], prompts, header, *ids, patience, jitter)
                ask = served(on_failure, api_key, leave_out_unusable)
            kinds = write_responses(ask, tokenizer, prompts, header, path, on_rows)
    told_kinds = ", ".join(f"{kinds[name]} {name}" for name in (("given",) if as_given else ANSWERED))
    line = f"{kinds['rows'] - kinds['failed']} responses in {path}: {told_kinds}"
    line += f"; conversations left out: {header.num_left_out}" if header.num_left_out else ""
    line += f"; failed tries: {len(failures)}, the last at {failures[-1]}" if failures else ""
    console.print(line, markup=False)


def encode(run: RunConfig, chats: Sequence[ChatFormat], as_given: bool, row: tuple[str, int, Any]) -> list[Prompt]:
    """What is asked, or given, for a row of the sources: with and without thinking as data says, and asked at every
    temperature. Raises: PromptError.
    """
    conversation, found = parse_conversation(*row), list[Prompt]()
    is_chat_route = bool(run.data.endpoints) and run.data.endpoint_route == "chat/completions" and not as_given
    if is_chat_route and conversation.text is not None:
        raise PromptError(f"{conversation.place}: plain text; data.endpoint_route chat/completions needs messages")
    for chat in chats:
        if as_given:
            found.append(given_row(chat, conversation))
            continue
        ids, how = encode_prompt(chat, conversation).tolist(), {"is_thinking": chat.is_thinking}
        found += [Prompt.of(conversation, ids, temperature=each, **how) for each in run.data.temperatures]
    most = max(len(prompt.ids) for prompt in found) + (0 if as_given else run.data.max_response_tokens)
    check_length(conversation.place, most, run.record.max_tokens)
    return found


def in_process(run: RunConfig, folder: Path, prompts: Prompts[Prompt], header: ResponsesHeader, device: str) -> Ask:
    """The target answers here; it is loaded when it is first asked."""

    @cache
    def target() -> Target[Any]:
        return load_target(folder, dtype=getattr(torch, run.target.dtype), device=device)

    def answer(asked: Sequence[Prompt], rows: Sequence[int]) -> list[torch.Tensor]:
        sampling = Sampling(asked[0].temperature or 0.0, header.max_response_tokens, header.stop_token_ids)
        ids, uniforms = [torch.tensor(prompt.prompt_ids) for prompt in asked], [row_uniforms(run.seed, r) for r in rows]
        return generate(target(), ids, sampling, uniforms)

    return in_batches(answer, prompts, header.generation_batch_size)


def tell_failure(failures: list[str], on_rows: Callable[..., None], reason: str) -> None:
    """Remember a failed try and show it; the first, the tenth, ... are printed."""
    failures.append(reason)
    on_rows(0, 0, f", failed try {len(failures)}: {reason:.60}")
    if len(failures) == 10 ** (len(str(len(failures))) - 1):
        Console(stderr=True, soft_wrap=True).print(f"failed try {len(failures)}: {reason}", markup=False)


def describe_row(tokenizer: PreTrainedTokenizerFast, row: Prompt) -> Text:
    """A conversation as the target reads it; what is to be predicted is bold green, what is only read is dim."""
    how = f"thinking {'on' if row.is_thinking else 'off'}"
    how += "" if row.temperature is None else f", temperature {row.temperature:g}"
    said = row.finish_reason if isinstance(row, Row) else "not answered yet"
    shown = Text(f"{row.source}:{row.index}, {how}: {said}\n", "bold")
    for number, (begin, end) in enumerate(pairwise([0, *chain.from_iterable(row.spans), len(row.ids)])):
        shown.append(str(tokenizer.decode(row.ids[begin:end])), "bold green" if number % 2 else "not bold dim")
    return shown.append("\n")


def read_api_key() -> str:
    """The endpoints' key from the environment. Raises: ConfigError, which does not repeat it, for one that no header
    can hold.
    """
    key = os.environ.get("DSPARK_API_KEY", "")
    if not all("!" <= letter <= "~" for letter in key):
        raise ConfigError("DSPARK_API_KEY: holds a space, a line's end or another sign that no key has; set it anew")
    return key
