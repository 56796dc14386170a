"""Memory of a step by formula, in microseconds: what a trace (train/memory_trace) would find, to about a fifth.

The coefficients are what the trace counts, per token and block, in units of the sizes of the model: what the forward
pass saves, with the kernels of the device. tests/plan/test_rough_memory.py compares the two.
"""

from penjing.kernels.fused_linear_cross_entropy import BLOCK_LOGITS, HOST_BLOCK_LOGITS
from penjing.plan.memory.sharded_memory import COMMUNICATION_BYTES
from penjing.plan.step_workload import VALUE_BYTES, Workload

ROUGH_MARGIN = 0.2  # of the sum
HOST_CONTEXT_BYTES = 250 << 20  # of a process with torch, on a CPU
FRAGMENTATION_SHARE, HEAP_SHARE = 0.05, 0.33  # of activations and logits: of torch's allocator, of a CPU's heap
MUON_BYTES, MOST_MUON_BYTES = 16, 1.5 * 2**30  # per parameter, of an update: it stacks matrices of one shape
LOG_PROB_BYTES = 12  # per logit: in float32, their softmax and its gradient
FLASH_COPIES = 10  # values of a query head that fused attention keeps, without our kernels


def rough_memory(
    work: Workload, *, state_bytes: float, context_bytes: int, on_host: bool = False, holds_scores: bool | None = None
) -> dict[str, int]:
    """Bytes by component, as the trace names them, at the peak of a step on one device.

    state_bytes: of the optimizer, per trainable parameter. context_bytes: of a card, besides tensors. holds_scores:
    of answers that share a prompt, on a card: whether attention with a mask holds its scores.
    """
    shape, tokens, layout, fused = work.shape, work.tokens, work.layout, work.triton_kernels or on_host
    size, value = shape.parameters, VALUE_BYTES[work.dtype]
    embedding = shape.vocabulary * shape.width
    block = tokens * _block_bytes(work, fused) * ((0.5 + 0.2 * value) if on_host else 1.0)
    scores = tokens * 4.0 * shape.heads * work.seq_len if holds_scores and shape.key_size != shape.query_size else 0.0
    block += scores
    inner = tokens * _inner_size(work) * (6 if fused else 4 * value)
    residual = 4 * tokens * shape.width
    saved = {"none": block, "mlp": block - inner, "block": residual}[work.recompute]
    saved *= (shape.layers - work.first_backward) / max(1, shape.layers)
    again = 0.0 if work.recompute == "none" else block * (2.0 if work.recompute == "block" else 1.0)
    logits = tokens * shape.vocabulary
    held = HOST_BLOCK_LOGITS if on_host else BLOCK_LOGITS
    head = (value + (0 if fused else 4)) * min(logits, held) + value * min(max(0, logits - held), held)
    if holds_scores is not None:  # log-probabilities of answers, without our kernel
        head = LOG_PROB_BYTES * min(logits, held)
    head += (4 + value % 4) * embedding + (2 if fused else 4) * tokens * shape.width
    moments = state_bytes * work.trained + (4 * embedding if work.optimizer == "muon" and not work.trainable else 0)
    keeps_gradients = work.passes > 1 or (work.ranks > 1 and not layout.shards)
    moved = saved * shape.layers + max(head, again)
    weights = 4 * (1 + work.extra_forwards) * size / layout.parts("weights")
    update = min(MUON_BYTES * size, MOST_MUON_BYTES) if work.optimizer == "muon" else 0.0
    found = {
        "weights": (0.6 if fused else 1.8) * size if value == 2 else weights,
        "master weights": weights if value == 2 else 0.0,
        "gradients": 4 * work.trained / layout.parts("gradients"),
        "optimizer state": moments / layout.parts("optimizer state"),
        "activations": saved * shape.layers + max(0.0, again - head),
        "logits and loss": min(head, moved),
        "temporaries": max(0.0, update - moved) + 2 * scores,
        "communication": COMMUNICATION_BYTES if work.ranks > 1 else 0.0,
        "fragmentation": 0.0 if on_host else FRAGMENTATION_SHARE * moved,
        "heap": HEAP_SHARE * moved if on_host else 0.0,
        "checkpoint copy": weights + moments if on_host else 0.0,
        "context": HOST_CONTEXT_BYTES if on_host else context_bytes,
    }
    if not keeps_gradients:  # they come as activations go: the peak has the one or the other
        found["gradients"] = max(0.0, found["gradients"] - moved)
    return {name: round(part) for name, part in found.items() if part}


def _inner_size(work: Workload) -> float:
    """Inner width that one token uses, averaged over the layers."""
    shape = work.shape
    mixture = shape.num_experts_per_tok * shape.moe_intermediate_size + shape.shared_size
    return (shape.num_dense * shape.intermediate_size + (shape.layers - shape.num_dense) * mixture) / shape.layers


def _block_bytes(work: Workload, fused: bool) -> float:
    """Bytes that one block saves for each token."""
    shape, value = work.shape, VALUE_BYTES[work.dtype]
    routed = 6 * shape.num_experts_per_tok * shape.width
    if fused:
        return 12 * shape.width + 6 * _inner_size(work) + 7 * shape.query_size + 6 * shape.key_size + routed
    is_grouped = shape.key_size != shape.query_size  # torch's fused kernels want as many key heads: maps are made
    maps = 4.0 * shape.heads * work.seq_len if is_grouped else 0.0
    widths = (9 + 2 * value) * shape.width + 4 * value * _inner_size(work)
    return widths + FLASH_COPIES * value / 2 * shape.query_size + maps + routed
