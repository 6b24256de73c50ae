"""``dspark prepare``: the target answers the prompts of a run."""

import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from dspark.cli.identity import describe_origin
from dspark.cli.mixing import prompt_sources
from dspark.cli.terminal import DEFAULT_DEVICE, Device, answer_progress
from dspark.config import load_run
from dspark.data.chat import ChatFormat, check_length, digest, encode_prompt
from dspark.data.conversations import Conversation, encode_each, read_conversations
from dspark.data.endpoints import EndpointAsker, Patience
from dspark.data.responses import RESPONSES_FILE, Ask, Prompt, ResponsesHeader, in_batches, write_responses
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.errors import ConfigError, PromptError
from dspark.files import claim
from dspark.target.loading import load_target, locate_target, target_facts
from dspark.target.tokenizer import load_tokenizer, stop_token_ids
from dspark.types import Target


def prepare(
    config: Annotated[Path, typer.Option(help="The run's YAML file.", readable=False)],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, for a trial.")] = None,
    leave_out_unusable: Annotated[
        bool, typer.Option("--leave-out-unusable", help="Go on without the prompts that cannot be used.")
    ] = False,
    device: Device = DEFAULT_DEVICE,
) -> None:
    """Let the target answer data.sources; the responses go to record.folder. Run again to resume.

    data.sources may be one YAML file that describes a mixture (dspark/data/mixture.py); its rows are kept in
    record.folder/prompts. With data.endpoints, servers of the target answer; the environment's DSPARK_API_KEY is their
    key. A failed try is made again; after 30 failures in a row at every endpoint, some 20 minutes, the run ends.
    """
    run = load_run(config, tuple(overrides or ()))
    folder = locate_target(run.target.path)
    tokenizer, stops = load_tokenizer(folder), stop_token_ids(folder)
    chat = ChatFormat(tokenizer, stops, run.data.is_thinking)
    api_key, is_served = read_api_key(), bool(run.data.endpoints)

    def encode(conversation: Conversation) -> Prompt:
        if is_served and run.data.endpoint_route == "chat/completions" and conversation.text is not None:
            raise PromptError(f"{conversation.place}: plain text; data.endpoint_route chat/completions needs messages")
        ids_T = encode_prompt(chat, conversation)
        check_length(conversation.place, len(ids_T) + run.data.max_response_tokens, run.record.max_tokens)
        return Prompt(conversation, ids_T)

    conversations = read_conversations(prompt_sources(run), run.data.split, run.data.max_conversations)
    prompts = encode_each(conversations, encode, is_leaving_out=leave_out_unusable)
    prompts.sort(key=lambda prompt: len(prompt.ids_T), reverse=True)  # batches of one length; the longest run first
    header = ResponsesHeader(
        **describe_origin(run, folder, tokenizer),
        prompts_sha256=digest(prompt.ids_T for prompt in prompts),
        num_prompts=len(prompts),
        num_left_out=len(conversations) - len(prompts),
        temperature=run.data.temperature,
        max_response_tokens=run.data.max_response_tokens,
        generation_batch_size=1 if is_served else run.data.generation_batch_size,
        served_as=f"{run.data.endpoint_route} of {run.data.served_model}" if is_served else None,
        stop_token_ids=stops,
        seed=run.seed,
    )
    sampling = Sampling(run.data.temperature, run.data.max_response_tokens, stops)

    @cache
    def target() -> Target[Any]:
        return load_target(folder, dtype=getattr(torch, run.target.dtype), device=device)

    def answer(ids: Sequence[torch.Tensor], first_row: int) -> list[torch.Tensor]:
        uniforms = [row_uniforms(run.seed, first_row + row) for row in range(len(ids))]
        return generate(target(), ids, sampling, uniforms)

    path, failures = run.record.folder / RESPONSES_FILE, list[str]()
    with claim(run.record.folder), answer_progress(len(prompts), failures) as on_rows:

        def on_failure(reason: str) -> None:
            failures.append(reason)
            on_rows(0, 0)
            if len(failures) == 10 ** (len(str(len(failures))) - 1):  # the first, the tenth, ...
                Console(stderr=True, soft_wrap=True).print(f"failed try {len(failures)}: {reason}", markup=False)

        ask: Ask = in_batches(answer, prompts, header.generation_batch_size)
        if is_served:
            facts, jitter = target_facts(folder), random.Random(run.seed)
            patience = Patience(300 + run.data.max_response_tokens / 5)  # a queue, then five tokens a second
            ids = (facts.vocab_size, facts.eos_token_id)
            ask = EndpointAsker(
                run.data, chat, prompts, header, *ids, patience, jitter, on_failure, api_key, leave_out_unusable
            )
        kinds = write_responses(ask, tokenizer, prompts, header, path, on_rows)
    notes = {
        "prompts left out": header.num_left_out + kinds["failed"],
        "encoded from text (is_retokenised)": kinds["retokenised"],
        "failed tries": len(failures) and f"{len(failures)}, the last at {failures[-1]}",
    }
    line = f"{len(prompts) - kinds['failed']} responses in {path}"
    line += "".join(f"; {name}: {value}" for name, value in notes.items() if value)
    Console(soft_wrap=True).print(line, highlight=False, markup=False)


def read_api_key() -> str:
    """The endpoints' key from the environment. Raises: ConfigError, which does not repeat it, for one that no header
    can hold.
    """
    key = os.environ.get("DSPARK_API_KEY", "")
    if not all("!" <= letter <= "~" for letter in key):
        raise ConfigError("DSPARK_API_KEY: holds a space, a line's end or another sign that no key has; set it anew")
    return key
