"""A conversation through the target's chat template: ids to generate from, or ids with the mask of what to predict."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from dspark.data.conversations import Conversation
from dspark.errors import PromptError


@dataclass(frozen=True)
class Encoded:
    """One sequence to record; ``place`` is where the user finds its text. Raises: PromptError when nothing is
    predicted.
    Shapes: ids_T int64, T >= 2; loss_mask_T bool, true at positions to predict, never the first.
    """

    ids_T: torch.Tensor
    loss_mask_T: torch.Tensor
    place: str

    def __post_init__(self) -> None:
        if not self.loss_mask_T[1:].any():
            needed = "expected assistant content, or plain text of at least two tokens"
            raise PromptError(f"{self.place}: nothing to predict among {len(self.ids_T)} tokens; {needed}")
        assert self.ids_T.shape == self.loss_mask_T.shape
        assert not self.loss_mask_T[0]

    @property
    def num_supervised(self) -> int:
        return int(self.loss_mask_T.sum())


@dataclass(frozen=True)
class ChatFormat:
    """The target's tokenizer and template, the ids that end a turn, and whether turns think."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: Collection[int]
    is_thinking: bool = False

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that are no words: special tokens and those that end a turn."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(token for token, said in added if said.special).union(self.stop_token_ids)


def encode_prompt(chat: ChatFormat, conversation: Conversation) -> torch.Tensor:
    """Ids up to where the target is to go on: its header after the last user turn, or the end of a plain text.

    The header holds the think block: ``<think>`` when thinking, an empty block when not. Assistant messages after the
    last user turn are dropped.
    Returns: int64 [T], T >= 1. Raises: PromptError when there is no user turn or no text.
    """
    if conversation.text is not None:
        return _text_ids(chat, conversation)
    messages = asked_messages(conversation)
    if not any(message["role"] == "user" and message["content"] for message in messages):
        roles = [message["role"] for message in conversation.messages]
        raise PromptError(f"{conversation.place}: found messages of {roles}; expected a user message with text")
    ids = encode_text(chat, _render(chat, conversation, messages, is_open=True))
    if not ids:
        raise PromptError(f"{conversation.place}: the chat template writes nothing; mend it or give rows with 'text'")
    return torch.tensor(ids)


def asked_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """The messages up to where the target is to go on: without assistant messages after the last user turn."""
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    return messages


def encode_answer(chat: ChatFormat, conversation: Conversation, text: str) -> list[int]:
    """Ids of an answer known as text, as our template writes it behind ``encode_prompt``: to its end-of-turn token.
    Raises: PromptError as ``encode_conversation``.
    """
    messages = (*asked_messages(conversation), {"role": "assistant", "content": text})
    *_, (piece, _), _ = _pieces(chat, replace(conversation, messages=messages))
    ids = encode_text(chat, piece)
    return ids[: _length_to_end_of_turn(chat, conversation, ids)]


def encode_conversation(chat: ChatFormat, conversation: Conversation) -> Encoded:
    """Ids and loss mask of a conversation as it stands, every assistant turn supervised.

    A turn is supervised from what follows its generation header (role line and think block) to its end-of-turn token.
    Header and content are tokenised apart, as they are when the target answers. In plain text every token but the first
    is supervised. Turns are told apart by where the template puts them, never by their tokens: markers such as
    ``<role>`` in a user's text are read as special tokens, as runtimes read them, but never move the mask.
    Raises: PromptError for an empty conversation or assistant turn, a turn that the template does not write as header
    plus content, or one that does not hold exactly one end-of-turn token; and for one that supervises everything, or
    special tokens only. Source: specs/ling-3.0.md 13; dspark.md 4.5.
    """
    if conversation.text is not None:
        ids_T = _text_ids(chat, conversation)
        return Encoded(ids_T, torch.arange(len(ids_T)) > 0, conversation.place)
    ids: list[int] = []
    mask: list[bool] = []
    for piece, is_assistant in _pieces(chat, conversation):
        piece_ids = encode_text(chat, piece)
        num_supervised = _length_to_end_of_turn(chat, conversation, piece_ids) if is_assistant else 0
        ids += piece_ids
        mask += [True] * num_supervised + [False] * (len(piece_ids) - num_supervised)
    supervised = [token for token, is_supervised in zip(ids, mask, strict=True) if is_supervised]
    if mask[0] or all(mask[1:]):
        reason = "everything is supervised, with no words before it to be predicted from"
    elif chat.special_ids.issuperset(supervised):
        names = " ".join(map(str, chat.tokenizer.convert_ids_to_tokens(supervised[:8])))
        reason = f"nothing is supervised but special tokens ({names})"
    else:
        return Encoded(torch.tensor(ids), torch.tensor(mask), conversation.place)
    raise PromptError(f"{conversation.place}: {reason}; check the chat template, or give assistant turns with words")


def check_length(place: str, num_tokens: int, max_tokens: int) -> None:
    """Refuse a sequence longer than ``record.max_tokens``. Raises: PromptError."""
    if num_tokens > max_tokens:
        hint = "raise it, lower data.max_response_tokens or shorten the text"
        raise PromptError(f"{place}: {num_tokens} tokens, at most {max_tokens} (record.max_tokens) are allowed; {hint}")


def add_to_digest(sha256: "hashlib._Hash", values_T: NDArray[Any]) -> None:
    """Take the length and content of the next array [T] (ids in int64, masks in bool) in: the checksum is equal exactly
    for equal arrays in equal order.
    """
    sha256.update(len(values_T).to_bytes(8, "little"))
    sha256.update(np.ascontiguousarray(values_T).data)


def _pieces(chat: ChatFormat, conversation: Conversation) -> list[tuple[str, bool]]:
    """The rendered conversation cut at every assistant turn's header and end; true marks what the assistant wrote."""
    messages = conversation.messages
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        roles = [message["role"] for message in messages]
        raise PromptError(f"{conversation.place}: found messages of {roles}; expected at least one assistant message")
    whole = _render(chat, conversation, messages)
    pieces: list[tuple[str, bool]] = []
    cursor = 0
    for index in turns:
        if not messages[index]["content"].strip():
            raise PromptError(f"{conversation.place}: message {index + 1} is an empty assistant turn; expected text")
        header = _render(chat, conversation, messages[:index], is_open=True)
        turn = _render(chat, conversation, messages[: index + 1])
        if not (turn.startswith(header) and whole.startswith(turn)):
            found = f"the template does not write message {index + 1} as {header[-40:]!r} plus its content"
            hint = f"make data.thinking ({chat.is_thinking}) fit the text, or give every assistant turn as a"
            never = "so the target would never be asked for it like this"
            raise PromptError(f"{conversation.place}: {found}, {never}; {hint} conversation of its own")
        pieces += [(whole[cursor : len(header)], False), (whole[len(header) : len(turn)], True)]
        cursor = len(turn)
    return [*pieces, (whole[cursor:], False)]


def _length_to_end_of_turn(chat: ChatFormat, conversation: Conversation, ids: list[int]) -> int:
    """How many of an assistant turn's ids reach to its end-of-turn token (templates may write a newline after it)."""
    ends = [index for index, token in enumerate(ids) if token in chat.stop_token_ids]
    if not ends:
        missing = f"an assistant turn ends without any of the target's end-of-turn ids {sorted(chat.stop_token_ids)}"
        hint = "check the chat template and eos_token_id in generation_config.json"
        raise PromptError(f"{conversation.place}: {missing}; {hint}")
    if len(ends) > 1:
        found = f"goes on after an end-of-turn token {chat.tokenizer.convert_ids_to_tokens(ids[ends[0]])!r}"
        hint = "which the target never does; take it out of the text, or give what follows as a turn of its own"
        raise PromptError(f"{conversation.place}: an assistant turn {found}, {hint}")
    return ends[0] + 1


def _render(
    chat: ChatFormat, conversation: Conversation, messages: Sequence[dict[str, Any]], is_open: bool = False
) -> str:
    if chat.tokenizer.chat_template is None:
        raise PromptError(f"{conversation.place}: the target has no chat template; give it rows with plain 'text'")
    options: dict[str, Any] = {"tools": list(conversation.tools) or None, "enable_thinking": chat.is_thinking}
    options |= {"tokenize": False, "add_generation_prompt": is_open}
    try:
        text = chat.tokenizer.apply_chat_template(list(messages), **options)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise PromptError(f"{conversation.place}: the chat template refuses the messages: {error}") from error
    assert isinstance(text, str)
    return text


def _text_ids(chat: ChatFormat, conversation: Conversation) -> torch.Tensor:
    ids = chat.tokenizer(conversation.text, verbose=False)["input_ids"]
    if not conversation.text or not ids:
        raise PromptError(f"{conversation.place}: the text is empty; expected some")
    return torch.tensor(ids)


def encode_text(chat: ChatFormat, text: str) -> list[int]:
    """Ids of a text as it stands; no special token is added."""
    ids: list[int] = chat.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] if text else []
    return ids
