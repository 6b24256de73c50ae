"""How many floating-point operations a micro-step's products are."""

from dspark.config import DraftConfig
from dspark.train.batches import Batch


def count_operations(config: DraftConfig, batch: Batch) -> dict[str, int]:
    """Floating-point operations of a micro-step's products, forward and backward, by part; a multiply-add is two.

    ``head`` the frozen head on every valid slot, on every teacher row that the slots' layout keeps (one for all slots
             of a piece that share it), and the gradient of the slots by it; the head itself has none
    ``markov`` W2 on every valid slot, and both gradients
    ``body`` the layers' matrices, and the Markov head's own ones, on every slot of every block, and both gradients
    ``context`` keys and values of all T tokens in every layer, and both gradients
    ``features`` fc on all T tokens and the gradient of its weights; the taps have none
    ``attention`` by visible keys: a slot sees what stands before its anchor and its own block; two products forward
             and five backward, which makes the scores again
    Left out: norms, rotations, softmax, the confidence row, embeddings, and what activation checkpointing repeats.
    """
    width, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    num_tokens, num_blocks, num_slots = len(batch.ids_T), len(batch.anchors_A), config.block_size
    valid, teachers = len(batch.slots.places_N), len(batch.slots.teachers_M)
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    layer = width * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    mixing = {"vanilla": 0, "gated": (width + rank) * rank, "rnn": (width + 2 * rank) * 3 * rank}
    visible = int((batch.anchors_A - batch.starts_A + num_slots).sum()) * num_slots
    layers = config.num_hidden_layers
    return {
        "head": 2 * width * vocab * (2 * valid + teachers),
        "markov": 3 * 2 * rank * vocab * valid,
        "body": 3 * 2 * num_blocks * num_slots * (layers * layer + mixing[config.markov_head_type]),
        "context": 3 * 2 * num_tokens * layers * width * 2 * keys,
        "features": 2 * 2 * num_tokens * len(config.target_layer_ids) * width * width,
        "attention": 7 * 2 * layers * queries * visible,
    }
