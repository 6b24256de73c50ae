"""The mistakes a user can make. Each message says the place, what was found, what was expected and what to do."""


class DsparkError(Exception):
    """A mistake that the caller can mend; doors print its message without a traceback and exit with status 2."""


def one_line(error: DsparkError | OSError) -> str:
    """What a door prints: a DsparkError's own message, or the file that the system refused to read or write."""
    if isinstance(error, DsparkError) or not error.strerror:
        return str(error)
    return (
        f"{error.filename2 or error.filename or 'a file'}: {error.strerror}; what was written before stays. "
        "Mend the path, its permissions or the free space, and run the same command again (train.py with --resume)"
    )


class ConfigError(DsparkError, ValueError):
    """A run description or a model's config.json that cannot be used."""


class CheckpointError(DsparkError, ValueError):
    """A model or training checkpoint that is missing, incomplete, damaged or made for something else."""


class RecordError(DsparkError, ValueError):
    """A record folder that is missing, incomplete, damaged or made from another target or text."""


class PromptError(DsparkError, ValueError):
    """Conversations or prompts that cannot be turned into a supervised example."""


class EndpointError(DsparkError, RuntimeError):
    """An endpoint that refuses a request, or endpoints that do not answer; what was answered before stays on disk."""


class DraftMismatchError(DsparkError, ValueError):
    """A draft that does not belong to the target it is used with."""


class TrainingError(DsparkError, ArithmeticError):
    """A loss or gradient that is not a finite number; the run stopped before the optimizer moved."""


class RankError(DsparkError, RuntimeError):
    """A rank of several that died or stands still; the message names it, and nothing after it counts."""
