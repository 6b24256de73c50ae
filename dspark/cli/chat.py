"""dspark chat: talk to the target with a draft on, and see which tokens were drafted."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dspark.cli.identity import choose_target, find_pair
from dspark.cli.terminal import DEFAULT_DEVICE, Device
from dspark.config import EvalSection, validated
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.decode.generation import DraftSpeaker
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Spoken, Stopwatch

DRAFTED, OWN, ASIDE = "green", "", "dim"


def chat(
    target: Annotated[str, typer.Option(help="A name (ling-3.0-nano, ...) or a Hugging Face folder.")],
    draft: Annotated[Path, typer.Option(help="An exported draft of it.")],
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw from the so many likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this much probability.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 1024,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32 or float64.")] = None,
    device: Device = DEFAULT_DEVICE,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    thinking: Annotated[bool, typer.Option(help="Let the target think before it answers.")] = False,
) -> None:
    """Talk to the target; what its draft wrote and it accepted is green, what it wrote itself is not.

    A line is a turn. Ctrl-C ends an answer, Ctrl-D (or Ctrl-C before a line) the talk. Text and distribution are the
    target's own. When the talk has more tokens than the draft has positions, its first turns are forgotten.
    """
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    chosen = choose_target(None, target, dtype, device)
    drawn = {"tasks": ["chat"], "max_new_tokens": max_new_tokens, "top_k": top_k, "top_p": top_p}
    plan = validated(EvalSection, drawn, "dspark chat")
    pair = find_pair(chosen.path, draft)
    sampling = Sampling(temperature, plan.max_new_tokens, pair.facts.stop_token_ids, plan.top_k, plan.top_p)
    model, drafter = pair.load(getattr(torch, chosen.dtype), device)
    form = ChatFormat(pair.tokenizer, pair.facts.stop_token_ids, thinking)
    speak, messages = DraftSpeaker(model, drafter), list[dict[str, Any]]()
    for turn, line in enumerate(lines(console)):
        messages.append({"role": "user", "content": line})
        room = pair.draft.max_position_embeddings - max_new_tokens
        if (prompt_ids_T := remember(console, form, messages, room)) is None:
            continue
        spoken = speak([prompt_ids_T], sampling, [row_uniforms(seed, turn)], Stopwatch())
        messages.append({"role": "assistant", "content": show(console, form, spoken)})


def remember(console: Console, form: ChatFormat, messages: list[dict[str, Any]], room: int) -> torch.Tensor | None:
    """The ids of the talk; while they are more than ``room``, its first turn is dropped, and said so. None, and the
    last line forgotten, when that alone is too long.
    """
    while messages:
        ids_T = encode_prompt(form, Conversation("chat", 1, tuple(messages)))
        if len(ids_T) <= room:
            return ids_T
        what = "the first turn is" if len(messages) > 1 else "this line is too long and"
        console.print(f"{len(ids_T)} tokens, room for {room}: {what} forgotten", style=ASIDE)
        del messages[:2]
    return None


def lines(console: Console) -> Iterator[str]:
    """What the user says, line by line, until it ends; empty lines say nothing."""
    while True:
        try:
            line = console.input(Text("> ", "bold")).strip()
            line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line:
            yield line


def show(console: Console, form: ChatFormat, spoken: Iterable[list[Spoken]]) -> str:
    """Print an answer as it comes, its last line and the running figures moving. Returns: the answer's text."""
    began, ids, rounds = time.perf_counter(), list[int](), list[Round]()
    text, line = "", Text()
    with Live(console=console, refresh_per_second=12, transient=True) as live:
        try:
            for (news,) in spoken:
                rounds += [news.counts] if news.counts else []
                for slot, new_id in enumerate(news.ids):
                    ids.append(new_id)
                    longer = str(form.tokenizer.decode(ids, skip_special_tokens=True))
                    if longer.endswith("\ufffd") or not longer.startswith(text):
                        continue  # some bytes of a character are still to come
                    is_drafted = news.counts is not None and slot < news.counts.accepted_drafts
                    line.append(longer[len(text) :], DRAFTED if is_drafted else OWN)
                    text = longer
                *whole, line = line.split("\n", allow_blank=True)
                for each in whole:
                    console.print(each)
                live.update(Group(line, figures(began, len(ids), rounds)))
        except KeyboardInterrupt:
            pass  # the answer ends here, the talk goes on
    console.print(line)
    console.print(figures(began, len(ids), rounds))
    return text


def figures(began: float, num_tokens: int, rounds: list[Round]) -> Text:
    """Tokens, rounds, acceptance length and speed so far, prefill included."""
    words = f"{num_tokens} tokens, {num_tokens / (time.perf_counter() - began):.1f} a second"
    if rounds:
        length = sum(counts.acceptance_length for counts in rounds) / len(rounds)
        words += f"; {length:.2f} a round, {len(rounds)} rounds"
    return Text(words, ASIDE)
