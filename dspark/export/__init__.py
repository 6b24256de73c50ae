"""Our weights in the layout that runtimes load, and back."""

from dspark.export.draft_config import (
    FolderFields,
    Runtime,
    architecture_for,
    read_draft_config,
    read_layout,
    unsupported,
)
from dspark.export.draft_folder import (
    check_target,
    draft_fingerprint,
    draft_parameter_count,
    has_tables,
    read_draft,
    read_provenance,
    write_draft,
)

__all__ = ["FolderFields", "Runtime", "architecture_for", "check_target", "draft_fingerprint", "draft_parameter_count"]
__all__ += [
    "has_tables",
    "read_draft",
    "read_draft_config",
    "read_layout",
    "read_provenance",
    "unsupported",
    "write_draft",
]
