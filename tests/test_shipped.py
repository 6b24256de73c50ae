"""What ships in data/nano keeps its promises: sizes, exact states, the target's own text, and a draft worth having."""

import pytest
import torch
from one_by_one import assert_every_count_agrees

from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.generation import DraftSpeaker, PlainSpeaker
from dspark.decode.sampling import Sampling
from dspark.draft.model import DraftModel
from dspark.eval.measure import decode_prompts, summarise
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import check_target, read_draft
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.model import LingModel
from dspark.target.tokenizer import load_tokenizer

FACTS = target_facts(NANO_FOLDER)
DRAFT = NANO_FOLDER / "draft"
SIZES = {"vocab_size": FACTS.vocab_size, "hidden_size": FACTS.hidden_size, "num_layers": FACTS.num_layers}


@pytest.fixture(scope="module")
def target() -> LingModel:
    target = load_target(NANO_FOLDER, target_layer_ids=check_target(DRAFT, **SIZES).target_layer_ids)
    assert isinstance(target, LingModel)
    return target


@pytest.fixture(scope="module")
def draft(target: LingModel) -> DraftModel:
    return read_draft(DRAFT, (target.embedding_VD, target.head_VD))


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    chat = ChatFormat(load_tokenizer(NANO_FOLDER), FACTS.stop_token_ids)
    return [encode_prompt(chat, conversation) for conversation in load_task("heldout", 8)]


def test_the_weights_keep_their_sizes() -> None:
    assert sum(path.stat().st_size for path in NANO_FOLDER.glob("*.safetensors")) <= 24_000_000
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= 12_000_000


def test_the_target_has_every_kind_of_part(target: LingModel) -> None:
    layers, config = range(FACTS.num_layers), target.config
    for kind in (config.is_latent, config.is_moe, config.routed_limit, config.shared_limit):
        assert {bool(kind(layer)) for layer in layers} == {True, False}
    assert config.num_nextn_predict_layers == 1


def test_verify_then_commit_equals_decoding_one_by_one_for_every_count(
    target: LingModel, prompts: list[torch.Tensor]
) -> None:
    drafts_BT = torch.stack([prompt_T[-9:] for prompt_T in prompts[3:6]])
    assert_every_count_agrees(target, [prompt_T[:20] for prompt_T in prompts[:3]], drafts_BT)


def test_greedy_text_is_plain_text_and_the_draft_earns_three_tokens_a_round(
    target: LingModel, draft: DraftModel, prompts: list[torch.Tensor]
) -> None:
    sampling = Sampling(0.0, 64, FACTS.stop_token_ids)
    ways = (DraftSpeaker(target, draft), PlainSpeaker(target))
    drafted, plain = (decode_prompts(way, prompts, sampling, seed=0) for way in ways)
    assert [text.ids_T.tolist() for text in drafted] == [text.ids_T.tolist() for text in plain]
    counts = summarise("heldout", 0.0, drafted).acceptance
    assert counts is not None
    assert counts.mean_acceptance_length >= 3.0
