"""The stages of a recorded step: their calls, and the bytes that their times are compared with."""

import torch

from dspark.kernels import block_attention, kda, markov, mla, moe, residual
from dspark.verifier.calls import Call, Recorder
from dspark.verifier.engine import Verifier
from dspark.verifier.step import OutputT, Resident
from dspark.verifier.weights import tensors_of


@torch.no_grad()
def fill(verifier: Verifier, num_tokens: int, context_tokens: int) -> None:
    """Noise in place of ``context_tokens`` read tokens, and a window of distinct random ids."""
    buffers, device = verifier.buffers, verifier.weights.device
    generator = torch.Generator(device).manual_seed(0)
    buffers.rows_MJC.normal_(generator=generator)
    buffers.history_LWC.normal_(generator=generator)
    buffers.state_LHEF.normal_(0, 0.1, generator=generator)
    rewind(verifier, context_tokens)
    ids_V = torch.randperm(verifier.vocab_size, generator=generator, device=device)
    verifier.ids_T.copy_(ids_V[: len(verifier.ids_T)])
    verifier.make_room(num_tokens)


def rewind(verifier: Verifier, context_tokens: int) -> None:
    """Set the committed length."""
    verifier.buffers.length_1.fill_(context_tokens)
    verifier.most_tokens = context_tokens


@torch.no_grad()
def record_step(step: Resident[OutputT]) -> tuple[dict[str, list[Call]], OutputT]:
    """Run a step kernel by kernel and keep its calls by stage; the committed memory is put back."""
    before = [tensor.clone() for tensor in step.memory()]
    recorder = Recorder()
    output = step.take(recorder)
    for tensor, content in zip(step.memory(), before, strict=True):
        tensor.copy_(content)
    return recorder, output


def distinct_experts(stages: dict[str, list[Call]]) -> list[int]:
    """Experts touched in each mixture layer, the shared one included; waits for the device."""
    return [int(call.args[2].num_active_1) for call in stages.get("MoE up", [])]


def call_bytes(call: Call, context_tokens: int) -> int:
    """Bytes that a call has to move once: weights and states, of the experts only those that some token chose.

    Activations are counted as inputs. ``context_tokens`` rows of the latent cache are read; a commit also writes its
    states. Reads the number of active experts from the device.
    """
    whole = sum(tensor.nbytes for tensor in tensors_of(call.args) if tensor.dtype != torch.int32)
    match call.func, *call.args:
        case (moe.up | moe.down, inputs, weights_XCD, dispatch, *_):
            return int(inputs.nbytes + weights_XCD[0].nbytes * int(dispatch.num_active_1))
        case (mla.attend, q_THC, rows_JC, *_):
            return int(q_THC.nbytes + rows_JC[0].nbytes * (context_tokens + len(q_THC)))
        case (mla.absorb, projected_TC, _, _, keys_HEC, *_):
            return int(projected_TC.nbytes + keys_HEC.nbytes)
        case (residual.embed_norm, ids_T, embedding_VD, *_):
            return int(embedding_VD[0].nbytes * len(ids_T))
        case (block_attention.attend, q_THE, keys_HJE, *_):
            return int(q_THE.nbytes + 2 * keys_HJE[:, 0].nbytes * (context_tokens + len(q_THE)))
        case (block_attention.write, rows_TC, *_):
            return int(2 * rows_TC.nbytes)
        case (markov.step, base_V, _, _, w2_VR, *_):
            return int(base_V.nbytes + w2_VR.nbytes)
        case (kda.commit, _, _, _, state_LHEF, *_):
            return int(whole + state_LHEF.nbytes)
    return whole
