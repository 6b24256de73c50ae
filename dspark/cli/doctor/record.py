"""Checks of a record: whose it is, what is supervised in it, and that its target still says what stands there."""

from dspark.cli.doctor.subject import Finding, NotApplicable, Subject
from dspark.cli.doctor.target import supervised
from dspark.data.chat import Encoded
from dspark.export import read_draft_config
from dspark.record.checking import check_shards
from dspark.record.writer import missing_shards
from dspark.target.loading import target_fingerprint
from dspark.target.tokenizer import template_fingerprint, tokenizer_fingerprint

NUM_SEQUENCES, SHOWN_LETTERS = 200, 300
"""Sequences whose masks are looked at, evenly spread; and how much of the first one's is shown."""


def record_origin(subject: Subject) -> Finding:
    """The record is finished, of this target and its words, and taps what the draft reads."""
    manifest, tokenizer, wrong = subject.record.manifest, subject.tokenizer, list[str]()
    expected: dict[str, object] = {
        "target_fingerprint": target_fingerprint(subject.folder),
        "tokenizer_fingerprint": tokenizer_fingerprint(subject.folder),
        "template_fingerprint": template_fingerprint(tokenizer) if tokenizer.chat_template else None,
    }
    if subject.draft_folder:
        expected["target_layer_ids"] = read_draft_config(subject.draft_folder).target_layer_ids
    found = {key: getattr(manifest, key) for key in expected}
    wrong = [f"{key} is {found[key]} there, {expected[key]} here" for key in expected if found[key] != expected[key]]
    if missing := missing_shards(subject.record.folder, manifest):
        wrong.append(f"{len(missing)} of {len(manifest.shards)} shards are not recorded")
    return Finding(not wrong, "; ".join(wrong) or f"{len(subject.record)} sequences of {manifest.num_tokens:,} tokens")


def loss_mask(subject: Subject) -> Finding:
    """Something is supervised everywhere, never everything of a conversation, and words, not markers alone."""
    reader, special, faults = subject.record, subject.chat.special_ids, list[str]()
    for index in range(0, len(reader), max(1, len(reader) // NUM_SEQUENCES)):
        ids_T, mask_T = reader.text(index)
        is_talk = reader.manifest.answers == "target" or not special.isdisjoint(ids_T[1:-1].tolist())
        if special.issuperset(ids_T[mask_T].tolist()):
            faults.append(f"sequence {index} supervises no words")
        elif mask_T[1:].all() and is_talk:
            faults.append(f"sequence {index} supervises everything, also what was asked")
    spans = [str(subject.tokenizer.decode(run)) for run in supervised(*reader.text(0))]
    shown = " ".join(" | ".join(spans).split())[:SHOWN_LETTERS]
    share = reader.manifest.num_supervised / reader.manifest.num_tokens
    return Finding(not faults, "; ".join(faults[:1]) or f"{share:.0%} are supervised; of the first sequence: {shown}")


def record_rows(subject: Subject) -> Finding:
    """Checksums of the first and the last shard hold, and the target says of their first texts what stands there."""
    reader = subject.record
    if reader.manifest.target_fingerprint != target_fingerprint(subject.folder):
        raise NotApplicable("the record is of another target")
    target, shards = subject.tapping(reader.manifest.target_layer_ids), sorted({0, reader.num_shards - 1})
    texts = {place: Encoded(*reader.text(place), "") for shard in shards for place in reader.members(shard)}
    checks = list(check_shards(reader, lambda: None, target, texts, shards))
    faults = [f"shard {found.index}: {found.fault}" for found in checks if found.fault]
    farthest = max((found.states_error or 0.0 for found in checks), default=0.0)
    return Finding(
        not faults, "; ".join(faults) or f"shards {shards}: states lie {farthest:.1g} of their norm from now's"
    )
