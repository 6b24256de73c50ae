"""Reading whole packed sequences through a rank's weights: prefill, teacher-forced passes, a target that only reads."""

from dspark.verifier.reading.packed import PackedReader
from dspark.verifier.reading.passes import read_mtp, read_packed

__all__ = ["PackedReader", "read_mtp", "read_packed"]
