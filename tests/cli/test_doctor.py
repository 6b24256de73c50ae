"""dspark doctor: a healthy target, record and draft pass, and every check is turned red by a fault of its own kind."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import pytest
import torch
from evaluating import write_tiny_draft
from recorded import record
from tiny import STOP_TOKEN_ID, VOCAB_SIZE, write_tiny_ling, write_tiny_qwen3
from torch import Tensor
from typer.testing import CliRunner

from dspark.cli.doctor import CHECKS, Subject, look
from dspark.cli.doctor import draft as of_draft
from dspark.cli.doctor import subject as of_machine
from dspark.cli.doctor import target as of_target
from dspark.cli.doctor.subject import WORDS
from dspark.cli.main import app
from dspark.data.chat import ChatFormat, Encoded, encode_conversation
from dspark.data.conversations import Conversation
from dspark.decode import generation, round
from dspark.decode.sampling import Sampling
from dspark.draft import backbone
from dspark.draft.proposal import propose
from dspark.export.draft_config import FolderFields
from dspark.export.draft_folder import read_draft, write_draft
from dspark.kernels.router.reference import route
from dspark.record import writer
from dspark.target.cache import LingCache
from dspark.target.experts import Router
from dspark.target.loading import NANO_FOLDER, load_tables, load_target, target_fingerprint
from dspark.target.model import LingModel
from dspark.target.tokenizer import load_tokenizer, template_fingerprint, tokenizer_fingerprint

NAMES = [check.__name__ for check in CHECKS]
TAPS = (1, 3, 4)
ROOT = Path(__file__).parents[2]
SAMPLE = WORDS["sample"]


Fault = Callable[["Patient", pytest.MonkeyPatch, Path], Subject]


class Patient(NamedTuple):
    """A folder with a target, a record and a draft; and what has been loaded of them."""

    place: Path
    subject: Subject


@pytest.fixture(scope="module", autouse=True)
def _few_words() -> Iterator[None]:
    """They are enough to tell right from wrong."""
    sample = "".join(SAMPLE.splitlines(keepends=True)[1:4])
    less = mock.patch.multiple(of_draft, NUM_PROMPTS=1, GREEDY_TOKENS=12)
    with mock.patch.dict(WORDS, sample=sample), less, mock.patch.object(of_target, "NUM_DECODED", 4):
        yield


def write_bigram_draft(folder: Path, target: Path, texts: list[Tensor], distance: int = 1) -> Path:
    """A draft that has seen what stands ``distance`` places behind every token of some texts."""
    write_tiny_draft(folder, target, markov_rank=VOCAB_SIZE)
    draft = read_draft(folder, load_tables(target))
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB_SIZE))
        draft.markov_head.markov_w2.weight.zero_()
        for ids_T in texts:
            draft.markov_head.markov_w2.weight[ids_T[distance:], ids_T[:-distance]] = 10.0
    shutil.rmtree(folder)
    write_draft(draft, folder, FolderFields(STOP_TOKEN_ID))
    return folder


def write_record(place: Path, folder: Path, target: Any, sequences: list[Encoded], **changes: Any) -> Path:
    target_folder = place / "target"
    facts = {"target_layer_ids": TAPS, "hidden_size": 32, "vocab_size": VOCAB_SIZE, "shard_tokens": 100}
    facts |= {"tokenizer_fingerprint": tokenizer_fingerprint(target_folder)}
    facts |= {"template_fingerprint": template_fingerprint(load_tokenizer(target_folder))}
    facts |= {"target_fingerprint": target_fingerprint(target_folder)}
    record(folder, target, sequences, **facts | changes)
    return folder


def sequences_of(subject: Subject) -> list[Encoded]:
    talks = [[("user", f"Add {n} and 2."), ("assistant", f"That is {n + 2}, I think.")] for n in range(5)]
    rows = [tuple({"role": role, "content": said} for role, said in talk) for talk in talks]
    return [encode_conversation(subject.chat, Conversation("talks", n + 1, row)) for n, row in enumerate(rows)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    place = tmp_path_factory.mktemp("healthy")
    write_tiny_ling(place / "target")
    bare = Subject(place / "target", None, None, "cpu")
    prompts = of_draft.prompts_of(bare)[:2]
    answers = generation.generate(bare.target, prompts, Sampling(0.0, 24, (STOP_TOKEN_ID,)), [float] * 2)
    texts = [bare.ids_T, *answers]
    write_bigram_draft(place / "draft", place / "target", texts)
    write_bigram_draft(place / "off by one", place / "target", texts, distance=2)
    sequences = sequences_of(bare)
    write_record(place, place / "record", bare.tapping(TAPS), sequences)
    return Patient(place, Subject(place / "target", place / "record", place / "draft", "cpu"))


def found_red(subject: Subject) -> dict[str, str]:
    findings = {check.__name__: look(check, subject) for check in CHECKS}
    return {name: finding.found for name, finding in findings.items() if finding.is_right is False}


def test_a_healthy_target_record_and_draft_pass_everything(healthy: Patient) -> None:
    findings = {check.__name__: look(check, healthy.subject) for check in CHECKS}
    assert {name for name, finding in findings.items() if finding.is_right is None} <= {"gpus"}
    assert not [name for name, finding in findings.items() if finding.is_right is False], findings


def fresh(healthy: Patient, **folders: Path | None) -> Subject:
    """The healthy one with other folders, of which nothing is loaded; its own target is."""
    own = {"folder": healthy.place / "target", "record_folder": healthy.place / "record"}
    own |= {"draft_folder": healthy.place / "draft"}
    subject = Subject(**own | folders, device="cpu")  # type: ignore[arg-type]
    if "folder" not in folders:
        subject.target = healthy.subject.target
    return subject


def copied(healthy: Patient, tmp_path: Path, name: str) -> Path:
    shutil.copytree(healthy.place / name, tmp_path / name)
    return tmp_path / name


def old_package(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    known = of_machine.version
    patch.setattr(of_machine, "version", lambda name: "1.0" if name == "torch" else known(name))
    return fresh(healthy, record_folder=None, draft_folder=None)


def gpus(patch: pytest.MonkeyPatch, number: int, capability: tuple[int, int], is_joined: bool) -> None:
    patch.setattr(torch.cuda, "device_count", lambda: number)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: is_joined)
    patch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def old_gpu(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    gpus(patch, 1, (8, 0), True)
    return fresh(healthy, record_folder=None, draft_folder=None)


def lonely_gpus(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    gpus(patch, 2, (9, 0), False)
    return fresh(healthy, record_folder=None, draft_folder=None)


def no_nccl(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    gpus(patch, 2, (9, 0), True)
    patch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    return fresh(healthy, record_folder=None, draft_folder=None)


def wrong_width(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    folder = copied(healthy, tmp_path, "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"moe_intermediate_size": 24}))
    return fresh(healthy, folder=folder, record_folder=None)


def small_machine(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    patch.setattr(of_machine, "free_bytes", lambda device: 1000)
    subject = fresh(healthy)
    del subject.target
    return subject


def full_disk(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    patch.setattr(writer, "disk_usage", lambda folder: mock.Mock(free=1e6))
    return fresh(healthy, record_folder=None, draft_folder=None)


def other_template(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    path = copied(healthy, tmp_path, "target") / "chat_template.jinja"
    path.write_text(path.read_text().replace("'</think>' ~ content", "'</think>\n' ~ content"))
    return fresh(healthy, folder=path.parent, record_folder=None)


def dropped_limit(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    subject = fresh(healthy, record_folder=None)
    patch.setattr(subject.target.model.layers[5].mlp, "limit", None)
    return subject


def shifted_taps(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    walk = LingModel._walk

    def shifted(model: LingModel, *given: Any) -> Any:
        right = model.target_layer_ids
        model.target_layer_ids = tuple(index + 1 for index in right)
        try:
            return walk(model, *given)
        finally:
            model.target_layer_ids = right

    patch.setattr(LingModel, "_walk", shifted)
    return fresh(healthy, record_folder=None)


def no_final_norm(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    subject = fresh(healthy, record_folder=None)
    patch.setattr(subject.target.model.norm, "forward", lambda hidden: hidden)
    return subject


def coarse_router(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    def coarse(gate: Router, x_ND: Tensor) -> Any:
        return route((x_ND.bfloat16() @ gate.weight.bfloat16().T).float(), gate.expert_bias, gate.law)

    patch.setattr(Router, "forward", coarse)
    patch.setitem(WORDS, "sample", SAMPLE)  # near ties are few
    return fresh(healthy, record_folder=None, draft_folder=None)


def forgetful_decoding(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    """The state of a window that is kept whole is not."""
    commit = LingCache._commit_linear

    def forget(cache: LingCache, counts_B: Tensor, is_whole: bool) -> None:
        before = cache.states
        commit(cache, counts_B, is_whole)
        cache.states = before if is_whole else cache.states

    patch.setattr(LingCache, "_commit_linear", forget)
    return fresh(healthy)


def no_rollback(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    """The state after a whole window stays, whatever was kept of it."""
    commit = LingCache._commit_linear
    patch.setattr(LingCache, "_commit_linear", lambda cache, counts_B, is_whole: commit(cache, counts_B, True))
    return fresh(healthy)


def foreign_record(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    subject = healthy.subject
    given = (healthy.place, tmp_path / "record", subject.tapping(TAPS), sequences_of(subject))
    return fresh(healthy, record_folder=write_record(*given, target_fingerprint="1" * 64))


def full_masks(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    subject = healthy.subject
    everything = [Encoded(each.ids_T, torch.arange(len(each.ids_T)) > 0, each.place) for each in sequences_of(subject)]
    folder = write_record(healthy.place, tmp_path / "record", subject.tapping(TAPS), everything)
    return fresh(healthy, record_folder=folder)


def other_states(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    other = load_target(write_tiny_ling(tmp_path / "other", seed=1), target_layer_ids=TAPS)
    folder = write_record(healthy.place, tmp_path / "record", other, sequences_of(healthy.subject))
    return fresh(healthy, record_folder=folder)


def foreign_draft(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    folder = copied(healthy, tmp_path, "draft")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_target_layers": 7}))
    return fresh(healthy, draft_folder=folder)


def misaligned_draft(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    return fresh(healthy, draft_folder=healthy.place / "off by one")


def misread(tmp_path: Path, **changes: Any) -> Subject:
    """The shipped draft, whose config.json says something else than what it was trained for."""
    shutil.copytree(NANO_FOLDER / "draft", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return Subject(NANO_FOLDER, None, tmp_path / "draft", "cpu")


def layer_ids_one_off(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    patch.setattr(of_draft, "GREEDY_TOKENS", 32)
    ids = json.loads((NANO_FOLDER / "draft" / "config.json").read_text())["target_layer_ids"]
    return misread(tmp_path, target_layer_ids=[index - 1 for index in ids])


def other_slot_convention(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    patch.setattr(of_draft, "GREEDY_TOKENS", 32)
    return misread(tmp_path, sample_from_anchor=False)


def leaking_anchor(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    """A block reads the target's state at its own anchor."""
    attend = backbone.anchor_attention
    patch.setattr(backbone, "anchor_attention", lambda *given: attend(*given[:-1], given[-1] + 1))
    return fresh(healthy)


def lossy_export(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    def write_without_context(draft: Any, *given: Any) -> None:
        other = deepcopy(draft)
        other.fc.weight.zero_()
        write_draft(other, *given)

    patch.setattr(of_draft, "write_draft", write_without_context)
    return fresh(healthy)


def other_markov_token(healthy: Patient, patch: pytest.MonkeyPatch, tmp_path: Path) -> Subject:
    """Decoding, and it alone, starts its blocks from another token than the anchor."""
    patch.setattr(round, "propose", lambda draft, context, anchor_id, *given: propose(draft, context, 0, *given))
    return fresh(healthy)


FAULTS = {
    old_package: "versions",
    old_gpu: "gpus",
    lonely_gpus: "gpus",
    no_nccl: "gpus",
    wrong_width: "census",
    small_machine: "memory",
    full_disk: "disk",
    other_template: "template",
    dropped_limit: "swiglu_limits",
    shifted_taps: "taps",
    no_final_norm: "head",
    coarse_router: "router_ties",
    forgetful_decoding: "decode_equals_prefill",
    no_rollback: "rollback",
    foreign_record: "record_origin",
    full_masks: "loss_mask",
    other_states: "record_rows",
    foreign_draft: "draft_fits",
    misaligned_draft: "slot_alignment",
    layer_ids_one_off: "conventions",
    other_slot_convention: "conventions",
    leaking_anchor: "leaks",
    lossy_export: "export_round_trip",
    other_markov_token: "parity",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_turns_its_own_check_red_and_no_other(
    healthy: Patient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault
) -> None:
    assert list(found_red(fault(healthy, monkeypatch, tmp_path))) == [FAULTS[fault]]


def test_every_check_has_a_cure_and_a_fault() -> None:
    assert set(NAMES) == set(WORDS["cures"]) == set(FAULTS.values())


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *words, "--device", "cpu"], catch_exceptions=False)
    return result.exit_code, " ".join(result.stdout.split())


def test_it_prints_a_row_a_check_the_cure_of_what_fails_and_exits_with_1(healthy: Patient, tmp_path: Path) -> None:
    code, text = run(str(healthy.place / "target"))
    assert code == 0
    assert f"{len(NAMES) - 10} pass, 0 fail, 10 not applicable" in text
    assert "no --record was given" in text
    folder = copied(healthy, tmp_path, "target")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    code, text = run(str(folder))
    assert code == 1
    assert "fail census" in text
    assert "truncated or damaged" in text
    assert "Cure: download the checkpoint again" in text
    assert "1 fail" in text


def test_a_folder_with_config_json_alone_is_counted_and_fails_nothing() -> None:
    code, text = run(str(ROOT / "configs" / "targets" / "ling-3.0-flash"))
    assert code == 0
    assert "63,783 tensors, 127,486,405,600 parameters" in text


def test_a_target_that_is_too_large_is_still_counted(healthy: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = small_machine(healthy, monkeypatch, healthy.place)
    assert look(of_target.census, subject).is_right
    assert look(of_target.rollback, subject) == (
        None,
        "the weights, in torch.float32, do not fit into the memory of cpu",
    )


def test_another_family_passes_what_applies_to_it(tmp_path: Path) -> None:
    subject = Subject(write_tiny_qwen3(tmp_path / "target"), None, None, "cpu")
    findings = {check.__name__: look(check, subject).is_right for check in CHECKS}
    assert [name for name, is_right in findings.items() if is_right is False] == []
    assert findings["census"]
    assert findings["template"]
    assert findings["decode_equals_prefill"]
    assert findings["rollback"]
    assert findings["head"] is None


def test_an_error_that_is_not_ours_goes_through(healthy: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_machine, "check_room", mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        look(of_machine.disk, fresh(healthy))


def test_ids_of_the_real_tokenizer_are_asked_of_a_target_with_its_vocabulary(
    healthy: Patient, ling_golden: dict[str, Any]
) -> None:
    golden, case = ling_golden["tokenizer_ids"], ling_golden["tokenizer_ids"]["rendered_no_thinking"]
    assert WORDS["golden"]["ids"] == case["ids"]
    assert WORDS["golden"]["text"] == case["text"]
    subject = fresh(healthy)
    tokenizer = PieceTokenizer(subject.chat.tokenizer, golden)
    subject.facts = subject.facts._replace(vocab_size=157184)
    subject.chat = ChatFormat(tokenizer, (156895,))  # type: ignore[arg-type]
    assert look(of_target.template, subject).is_right
    tokenizer.ids["HUMAN"] = [5468]
    finding = look(of_target.template, subject)
    assert finding.is_right is False
    assert "are not Ling's ids" in finding.found


class PieceTokenizer:
    """The real tokenizer, as far as the golden file tells its ids."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __init__(self, tokenizer: Any, golden: dict[str, Any]) -> None:
        self.chat_template, self.apply_chat_template = tokenizer.chat_template, tokenizer.apply_chat_template
        self.ids = {word: [token] for word, token in golden["special"].items()} | golden["pieces"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [token for word in self._words(text) for token in self.ids[word]]}

    def decode(self, ids: list[int]) -> str:
        words, text = {tuple(ids): word for word, ids in self.ids.items()}, ""
        while ids:
            size = next(size for size in range(len(ids), 0, -1) if tuple(ids[:size]) in words)
            text, ids = text + words[tuple(ids[:size])], ids[size:]
        return text

    def _words(self, text: str) -> list[str]:
        return re.findall("|".join(map(re.escape, self.ids)), text)
