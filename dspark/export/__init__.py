"""Our weights in the layout that runtimes load, and back."""

from dspark.export.draft_config import Architecture, FolderFields, read_draft_config
from dspark.export.draft_folder import (
    check_target,
    draft_fingerprint,
    draft_parameter_count,
    draft_shapes,
    read_draft,
    write_draft,
)

__all__ = [
    "Architecture",
    "FolderFields",
    "check_target",
    "draft_fingerprint",
    "draft_parameter_count",
    "draft_shapes",
    "read_draft",
    "read_draft_config",
    "write_draft",
]
