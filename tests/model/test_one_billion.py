"""What training 1B parameters takes, on tensors without data: it fits a 24 GB card."""

import torch
from small_models import sizes

from penjing.model.config import ModelConfig
from penjing.model.linear import set_compute_dtype
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer, recompute_activations
from penjing.optim.muon import Muon

CARD = 23.5e9  # bytes that a 24 GB card has left beside its CUDA context
SHAPE = ModelConfig(**sizes(32768, 2048, 18, 16, 8, 128, 6144))


def test_the_whole_training_state_fits():
    """Weights, gradients, optimizer, activations kept, the casts of one block, the head's block of logits."""
    with torch.device("meta"):
        model = Transformer(SHAPE)
    set_compute_dtype(model, torch.bfloat16)
    recompute_activations(model, "block")
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 0.9e9 < count < 1.1e9
    rows, num_tokens = 4, 2048
    ids_BT = torch.zeros(rows, num_tokens, dtype=torch.long, device="meta")
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        target_N, weight_N = ids_BT.flatten(), torch.ones(rows * num_tokens, device="meta")
        model(ids_BT, score=CrossEntropy(target_N, weight_N))
    activations = sum(size for key, size in kept.items() if key not in owned)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    held = 2 * 4 * count
    for optimizer in Muon(state_dtype="bfloat16").build(model):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                matrix = parameter.ndim == 2 and parameter.shape[0] != SHAPE.vocab_size
                held += parameter.numel() * (2 if matrix else 8)
    one_block = sum(parameter.numel() for parameter in model.blocks[0].parameters()) * 2 * 2
    inside_block = rows * num_tokens * (10 * SHAPE.hidden_size + 5 * SHAPE.intermediate_size) * 4
    head = 4 * SHAPE.vocab_size * SHAPE.hidden_size + (1 << 26) * 6
    total = held + activations + one_block + inside_block + head
    assert total < CARD, f"{total / 1e9:.1f} GB"
    assert held / count < 10.5  # bytes a parameter
