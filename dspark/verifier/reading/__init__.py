"""Reading whole packed sequences through a rank's weights: prefill and teacher-forced passes."""

from dspark.verifier.reading.passes import read_mtp, read_packed

__all__ = ["read_mtp", "read_packed"]
