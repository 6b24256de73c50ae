"""Our weights in the layout that runtimes load, and back."""

from dspark.export.draft_config import Architecture, FolderFields, architecture_for, read_draft_config
from dspark.export.draft_folder import check_target, draft_fingerprint, draft_parameter_count, read_draft, write_draft

__all__ = ["Architecture", "FolderFields", "architecture_for", "check_target", "draft_fingerprint"]
__all__ += ["draft_parameter_count", "read_draft", "read_draft_config", "write_draft"]
