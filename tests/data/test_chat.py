"""The mask is true on what the assistant wrote and on its end of turn, and nowhere else."""

import json
import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from recorded import digest
from tiny import STOP_TOKEN_ID, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.data.chat import ChatFormat, Encoded, check_length, encode_conversation, encode_prompt
from dspark.data.conversations import Conversation, parse_conversation
from dspark.errors import PromptError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(tokenizer, (STOP_TOKEN_ID,))


@pytest.fixture
def thinking_chat(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    return ChatFormat(tokenizer, (STOP_TOKEN_ID,), is_thinking=True)


def talk(*turns: str, **last: str) -> Conversation:
    roles = {"S": "system", "U": "user", "A": "assistant"}
    messages = [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]
    messages[-1] |= last
    return Conversation("talk.jsonl", 7, tuple(messages))


def supervised(chat: ChatFormat, encoded: Encoded) -> list[str]:
    """The texts of the runs of supervised tokens."""
    runs: list[list[int]] = []
    for index, (token, is_on) in enumerate(zip(encoded.ids_T.tolist(), encoded.loss_mask_T.tolist(), strict=True)):
        if is_on and not (index and encoded.loss_mask_T[index - 1]):
            runs.append([])
        if is_on:
            runs[-1].append(token)
    return [chat.tokenizer.decode(run) for run in runs]


class PieceTokenizer:
    """The real Ling tokenizer, as far as the golden file tells its ids."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, tokenizer: PreTrainedTokenizerFast, golden: dict[str, Any]) -> None:
        self.chat_template, self.apply_chat_template = tokenizer.chat_template, tokenizer.apply_chat_template
        self.ids = {word: [token] for word, token in golden["special"].items()} | golden["pieces"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        words = re.findall("|".join(map(re.escape, self.ids)), text)
        assert "".join(words) == text
        return {"input_ids": [token for word in words for token in self.ids[word]]}


def test_the_golden_conversation_has_the_real_ids_and_supervises_two_answers(
    tokenizer: PreTrainedTokenizerFast, ling_golden: dict[str, Any]
) -> None:
    golden = ling_golden["tokenizer_ids"]
    chat = ChatFormat(PieceTokenizer(tokenizer, golden), (156895,))  # type: ignore[arg-type]
    case = golden["rendered_no_thinking"]
    messages = tuple({"role": role, "content": content} for role, content in case["messages"])
    encoded = encode_conversation(chat, Conversation("golden", 1, messages))
    assert encoded.ids_T.tolist() == case["ids"]
    answers = [golden["pieces"][messages[index]["content"]] + [156895] for index in (1, 3)]
    assert encoded.ids_T[encoded.loss_mask_T].tolist() == answers[0] + answers[1]
    starts = torch.nonzero(encoded.loss_mask_T & ~encoded.loss_mask_T.roll(1))[:, 0].tolist()
    header = golden["generation_prompt_ids"]["thinking_off"]
    assert [case["ids"][start - len(header) : start] for start in starts] == [header, header]


def golden_talk(*turns: dict[str, str], **others: Any) -> Conversation:
    roles = ("user", "assistant", "user", "assistant")
    words = ("Who are you?", "My name is Qwen2.", "How old are you?", "11 years old.")
    messages = [{"role": role, "content": said} | turn for role, said, turn in zip(roles, words, turns, strict=True)]
    return Conversation("golden", 1, tuple(messages), **others)


@pytest.mark.parametrize("is_thinking", [False, True])
@pytest.mark.parametrize("system", ["", "ASSISTANT"])
def test_thinking_a_system_turn_and_old_reasoning_have_the_real_ids(
    tokenizer: PreTrainedTokenizerFast, ling_golden: dict[str, Any], is_thinking: bool, system: str
) -> None:
    """Put together from the golden pieces; the template always writes a system turn and keeps what was thought."""
    golden = ling_golden["tokenizer_ids"]
    piece, mark = golden["pieces"], {name: [token] for name, token in golden["special"].items()}
    chat = ChatFormat(PieceTokenizer(tokenizer, golden), (156895,), is_thinking)  # type: ignore[arg-type]
    thought = "11 years old." if is_thinking else ""
    conversation = golden_talk({}, {"reasoning_content": thought} if thought else {}, {}, {})
    if system:
        turns = ({"role": "system", "content": system}, *conversation.messages)
        conversation = replace(conversation, messages=turns)

    def turn(role: str, *ids: list[int]) -> list[int]:
        return [*mark["<role>"], *piece[role], *mark["</role>"], *(token for part in ids for token in part)]

    end, head = mark["<|role_end|>"], [*piece["\n"], *mark["<think>"]]
    switch = piece["detailed thinking on" if is_thinking else "detailed thinking off"]
    first = turn("SYSTEM", piece[system] + piece["\n"] if system else [], switch, end)
    first += turn("HUMAN", piece["Who are you?"], end)
    first += turn(
        "ASSISTANT", head, piece[thought] if thought else [], mark["</think>"], piece["My name is Qwen2."], end
    )
    asked = first + turn("HUMAN", piece["How old are you?"], end)
    opening = golden["generation_prompt_ids"]["thinking_on" if is_thinking else "thinking_off"]
    assert encode_prompt(chat, conversation).tolist() == asked + opening
    last = turn("ASSISTANT", head, mark["</think>"], piece["11 years old."], end)
    assert encode_conversation(chat, conversation).ids_T.tolist() == asked + last


def test_tools_and_calls_stand_where_the_template_puts_them(chat: ChatFormat) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
    row = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "So:"}], "tools": [tool]}
    row["messages"][1]["tool_calls"] = [call]
    row["messages"] += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]
    conversation = parse_conversation("talk.jsonl", 7, row)
    encoded = encode_conversation(chat, conversation)
    text = chat.tokenizer.decode(encoded.ids_T)
    assert f"\n<tools>\n{json.dumps(tool)}\n</tools>\n" in text[: text.index("detailed thinking off<|role_end|>")]
    said = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    said += "<arg_key>b</arg_key>\n<arg_value>two</arg_value>\n</tool_call>"
    assert supervised(chat, encoded) == [f"So:{said}<|role_end|>", "It is 2.<|role_end|>"]
    observed = "<role>OBSERVATION</role>\n<tool_response>\n2\n</tool_response><|role_end|>"
    assert f"{said}<|role_end|>{observed}<role>ASSISTANT</role>" in text
    assert json.dumps(tool) in chat.tokenizer.decode(encode_prompt(chat, conversation))
    with pytest.raises(PromptError, match=r"talk.jsonl:7: tools is 'add'; expected a list of objects"):
        parse_conversation("talk.jsonl", 7, row | {"tools": "add"})


CHATML = """{% if messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_another_familys_own_template_is_followed(tokenizer: PreTrainedTokenizerFast) -> None:
    """As that of SmolLM2: a system turn of its own where there is none, a newline after the end of turn."""
    chatml = with_template(tokenizer, CHATML)
    chatml.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chat = ChatFormat(chatml, (chatml.convert_tokens_to_ids("<|im_end|>"),))
    encoded = encode_conversation(chat, talk("U:a", "A:b", "U:c", "A:d"))
    head = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    tail = "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert chatml.decode(encoded.ids_T) == f"{head}{tail}d<|im_end|>\n"
    assert supervised(chat, encoded) == ["b<|im_end|>", "d<|im_end|>"]
    assert chatml.decode(encode_prompt(chat, talk("U:a", "A:b", "U:c"))) == head + tail


ANSWERS_ONLY = "{% for m in messages if m.role != 'user' %}{{ m.content }}<|role_end|>{% endfor %}"


def test_a_mask_of_everything_or_of_special_tokens_only_is_refused(
    chat: ChatFormat, tokenizer: PreTrainedTokenizerFast
) -> None:
    bare = ChatFormat(with_template(tokenizer, ANSWERS_ONLY), (STOP_TOKEN_ID,))
    with_bos = ChatFormat(with_template(tokenizer, "<|startoftext|>" + ANSWERS_ONLY), (STOP_TOKEN_ID,))
    for form in (bare, with_bos):
        with pytest.raises(PromptError, match=r"talk.jsonl:7: everything is supervised, with no words before") as error:
            encode_conversation(form, talk("U:a", "A:b", "U:c", "A:d"))
        assert "\n" not in str(error.value)
    assert supervised(bare, encode_conversation(bare, talk("S:a", "A:b"))) == ["b<|role_end|>"]
    for content in ("</think>", "<tool_call></tool_call>"):
        with pytest.raises(
            PromptError, match=r"talk.jsonl:7: nothing is supervised but special tokens \(.*<.role_end.>"
        ):
            encode_conversation(chat, talk("U:Hello", f"A:{content}"))
    assert encode_conversation(chat, talk("U:Hello", "A:</think>", "U:So?", "A:Hi")).num_supervised == 5


def test_the_golden_text_is_what_our_template_writes(chat: ChatFormat, ling_golden: dict[str, Any]) -> None:
    case = ling_golden["tokenizer_ids"]["rendered_no_thinking"]
    messages = tuple({"role": role, "content": content} for role, content in case["messages"])
    encoded = encode_conversation(chat, Conversation("golden", 1, messages))
    assert chat.tokenizer.decode(encoded.ids_T) == case["text"]
    assert supervised(chat, encoded) == ["My name is Qwen2.<|role_end|>", "11 years old.<|role_end|>"]


def test_the_system_and_user_turns_are_context_only(chat: ChatFormat) -> None:
    encoded = encode_conversation(chat, talk("S:Be brief.", "U:Hello", "A:Hi", "U:Bye"))
    assert supervised(chat, encoded) == ["Hi<|role_end|>"]
    assert "Be brief.\ndetailed thinking off" in chat.tokenizer.decode(encoded.ids_T)
    assert encoded.num_supervised == int(encoded.loss_mask_T.sum())


def test_a_thinking_turn_supervises_its_reasoning_but_not_the_header(thinking_chat: ChatFormat) -> None:
    encoded = encode_conversation(thinking_chat, talk("U:1+1?", "A:2", reasoning_content="Easy."))
    assert supervised(thinking_chat, encoded) == ["Easy.</think>2<|role_end|>"]
    plain = encode_conversation(thinking_chat, talk("U:1+1?", "A:2"))
    assert supervised(thinking_chat, plain) == ["</think>2<|role_end|>"]


def test_a_think_end_inside_the_answer_belongs_to_the_answer(chat: ChatFormat) -> None:
    encoded = encode_conversation(chat, talk("U:Which tag?", "A:It is </think>, yes.", "U:Sure?", "A:Yes."))
    assert supervised(chat, encoded) == ["It is </think>, yes.<|role_end|>", "Yes.<|role_end|>"]


def test_a_prompt_is_exactly_the_unsupervised_start_of_the_answered_conversation(
    chat: ChatFormat, thinking_chat: ChatFormat
) -> None:
    asked = talk("S:Be brief.", "U:Hello", "A:Hi", "U:1+1?")
    for form, header in ((chat, "<think></think>"), (thinking_chat, "<think>")):
        prompt_ids_T = encode_prompt(form, asked)
        assert form.tokenizer.decode(prompt_ids_T).endswith("<role>ASSISTANT</role>\n" + header)
        answered = Conversation("", 1, (*asked.messages, {"role": "assistant", "content": "2"}))
        encoded = encode_conversation(form, answered)
        assert encoded.ids_T[: len(prompt_ids_T)].tolist() == prompt_ids_T.tolist()
        assert encoded.loss_mask_T[len(prompt_ids_T) :].all()
        assert encode_prompt(form, answered).tolist() == prompt_ids_T.tolist()


def test_plain_text_supervises_everything_after_its_first_token(chat: ChatFormat) -> None:
    text = Conversation("", 1, text="def add(a, b):\n")
    encoded = encode_conversation(chat, text)
    assert chat.tokenizer.decode(encoded.ids_T) == text.text
    assert encoded.loss_mask_T.tolist() == [False] + [True] * (len(encoded.ids_T) - 1)
    assert encode_prompt(chat, text).tolist() == encoded.ids_T.tolist()


def test_what_a_template_writes_after_the_end_of_turn_is_not_supervised(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% for m in messages %}<role>{{ m.role }}</role>{{ m.content }}<|role_end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<role>assistant</role>{% endif %}"
    chat = ChatFormat(with_template(tokenizer, template), (STOP_TOKEN_ID,))
    assert supervised(chat, encode_conversation(chat, talk("U:a", "A:b"))) == ["b<|role_end|>"]


def with_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> PreTrainedTokenizerFast:
    changed = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|role_end|>")
    changed.chat_template = template
    return changed


def test_a_turn_that_the_target_would_never_be_asked_for_is_refused(chat: ChatFormat) -> None:
    with pytest.raises(PromptError, match=r"talk.jsonl:7: .*message 2 .*data.thinking \(False\)"):
        encode_conversation(chat, talk("U:1+1?", "A:2", reasoning_content="Easy."))


def test_a_template_that_drops_old_turns_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% set m = messages[-1] %}{% if m.role == 'assistant' %}{{ m.content }}<|role_end|>{% endif %}"
    chat = ChatFormat(with_template(tokenizer, template), (STOP_TOKEN_ID,))
    with pytest.raises(PromptError, match="the template does not write message 2"):
        encode_conversation(chat, talk("U:a", "A:b", "U:c", "A:d"))


@pytest.mark.parametrize(
    ("conversation", "words"),
    [
        (Conversation("talk.jsonl", 7), ["found messages of []", "expected at least one assistant message"]),
        (talk("U:Hello"), ["found messages of ['user']", "expected at least one assistant message"]),
        (talk("U:Hello", "A: "), ["message 2 is an empty assistant turn", "expected text"]),
        (talk("U:Hello", "A:Hi", role="robot"), ["expected at least one assistant message"]),
        (Conversation("talk.jsonl", 7, text=""), ["the text is empty"]),
        (Conversation("talk.jsonl", 7, text="a"), ["nothing to predict among 1 tokens", "at least two tokens"]),
    ],
)
def test_an_empty_or_all_masked_conversation_is_named(
    chat: ChatFormat, conversation: Conversation, words: list[str]
) -> None:
    with pytest.raises(PromptError) as error:
        encode_conversation(chat, conversation)
    for word in ["talk.jsonl:7: ", *words]:
        assert word in str(error.value)


def test_a_prompt_without_a_question_is_named(chat: ChatFormat) -> None:
    for conversation in (talk("S:Be brief."), talk("U:"), talk("A:Hi"), Conversation("talk.jsonl", 7, text="")):
        with pytest.raises(PromptError, match=r"talk.jsonl:7: .*expected"):
            encode_prompt(chat, conversation)


def test_what_the_template_refuses_or_lacks_is_named(chat: ChatFormat, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(PromptError, match=r"talk.jsonl:7: the chat template refuses .*unknown role robot"):
        encode_prompt(
            chat, Conversation("talk.jsonl", 7, ({"role": "user", "content": "a"}, {"role": "robot", "content": ""}))
        )
    without = ChatFormat(with_template(tokenizer, None), (STOP_TOKEN_ID,))
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompt(without, talk("U:a"))
    with pytest.raises(PromptError, match="without any of the target's end-of-turn ids"):
        encode_conversation(ChatFormat(tokenizer, (5000,)), talk("U:a", "A:b"))


def test_a_sequence_over_the_limit_is_named_with_both_numbers() -> None:
    check_length("talk.jsonl:7", 10, 10)
    with pytest.raises(PromptError, match=r"talk.jsonl:7: 11 tokens, at most 10 \(record.max_tokens\)"):
        check_length("talk.jsonl:7", 11, 10)


def test_the_digest_knows_where_one_text_ends() -> None:
    one, two = torch.tensor([1, 2]), torch.tensor([3])
    assert digest([one, two]) == digest([one.clone(), two.clone()])
    assert len({digest([one, two]), digest([two, one]), digest([torch.tensor([1]), torch.tensor([2, 3])])}) == 3
