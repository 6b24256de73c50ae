"""The rounds.parquet of an evaluation, read as any reader of parquet would."""

from pathlib import Path

from pyarrow import parquet

from dspark.decode.round import Round
from dspark.eval.records import TextKey


def read_rounds(path: Path) -> dict[TextKey, tuple[Round, ...]]:
    """The rounds of every text that has any; their numbers are in order."""
    found: dict[TextKey, tuple[Round, ...]] = {}
    for row in parquet.read_table(path).to_pylist():
        key = TextKey(*(row.pop(name) for name in ("task", "temperature", "contender", "prompt_index")))
        assert row.pop("round_index") == len(found.get(key, ()))
        found[key] = (*found.get(key, ()), Round(**row | {"confidence_logits": tuple(row["confidence_logits"])}))
    return found
