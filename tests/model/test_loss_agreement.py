"""Every way of being fast gives the loss of the plain way, within a bound that stands here.

The plain way: float32, eager, each document alone in its own row, all logits at once, torch's cross-entropy. Compared
are the mean loss in nats per token and the gradient, as the length of the difference over the length of the plain one.
"""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as functional
from small_models import sizes

from penjing import devices
from penjing.loader.batch import cu_seqlens
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import set_compute_dtype
from penjing.model.score import CrossEntropy, CrossEntropyOfTwo
from penjing.model.transformer import Transformer
from penjing.train.compile_policy import compile_model

CPU = torch.device("cpu")
LENGTHS = (70, 58, 100, 28)  # of the documents, targets included: two rows of 128
SHAPE = ModelConfig(**sizes(300, 64, 3, 4, 2, 16, 160))


@dataclass(frozen=True)
class Way:
    """What is switched on, and how far off it may be."""

    loss: float  # nats per token
    gradient: float  # share of the gradient's length
    packing: bool = False
    padding: bool = False
    fused_head: bool = False
    two: bool = False  # with a second target, here the same
    compiled: str = ""  # as `compile_model` takes it
    dtype: torch.dtype | None = None


# float32 ways differ by the order of sums; half precision rounds inputs of matmuls to 8 or 11 bits.
WAYS = {
    "fused head": Way(2e-6, 2e-5, fused_head=True),
    "packing": Way(2e-6, 2e-5, packing=True, fused_head=True),
    "masking": Way(2e-6, 2e-5, padding=True, fused_head=True),
    "two targets": Way(2e-6, 2e-5, packing=True, fused_head=True, two=True),
    "compiled": Way(2e-6, 2e-5, packing=True, fused_head=True, compiled="blocks"),
    "bfloat16": Way(5e-3, 3e-2, packing=True, fused_head=True, dtype=torch.bfloat16),
    "float16": Way(1e-3, 5e-3, packing=True, fused_head=True, dtype=torch.float16),
    "all of it": Way(5e-3, 3e-2, packing=True, fused_head=True, compiled="blocks", dtype=torch.bfloat16),
}
# On a GPU, half precision goes through kernels of our own (kernels/triton/ops.py), float32 through torch's operations.
GPU_WAYS = WAYS | {
    "graphs": Way(5e-3, 3e-2, packing=True, fused_head=True, compiled="graphs", dtype=torch.bfloat16),
    "graphs of two targets": Way(
        5e-3, 3e-2, packing=True, fused_head=True, two=True, compiled="graphs", dtype=torch.bfloat16
    ),
    "float16 compiled": Way(1e-3, 5e-3, packing=True, fused_head=True, compiled="blocks", dtype=torch.float16),
}


def documents():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(300, (length + 1,), generator=generator) for length in LENGTHS]


def a_model(dtype=None):
    model = Transformer(SHAPE)
    initialise(model, 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():  # residual outputs begin at zero, and would hide what is before them
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    set_compute_dtype(model, dtype)
    return model


def plain():
    model, total = a_model(), 0.0
    for ids in documents():
        logits_TV = model(ids[None, :-1])[0]
        total = total + functional.cross_entropy(logits_TV, ids[1:], reduction="sum")
    loss = total / sum(LENGTHS)
    loss.backward()
    return loss.item(), flat(model)


def flat(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def rows(way):
    """ids_BT, document_BT, target_BT; -1 where nothing stands."""
    ids, target, document = [], [], []
    for number, each in enumerate(documents()):
        ids.append(each[:-1])
        target.append(each[1:])
        document.append(torch.full((len(each) - 1,), number))
    if way.packing:
        joined = [torch.cat(x).view(2, 128) for x in (ids, document, target)]
        return joined[0], joined[1], joined[2]
    filled = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value)
              for x, value in ((ids, 0), (document, -1), (target, -1))]  # fmt: skip
    return filled[0], filled[1], filled[2]


@pytest.fixture(scope="module")
def reference():
    return plain()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly) if w.compiled else n for n, w in WAYS.items()]
)
def test_it_is_the_loss_of_the_plain_way(name, reference):
    check(WAYS[name], reference, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", GPU_WAYS)
def test_it_is_the_loss_of_the_plain_way_on_a_gpu(name, reference):
    check(GPU_WAYS[name], reference, torch.device("cuda"))


def check(way, reference, device):
    if way.compiled and devices.of(device).missing_compiler():
        pytest.skip("no compiler")
    model = a_model(way.dtype).to(device)
    if way.compiled:
        torch._dynamo.reset()
        compile_model(model, way.compiled)
    ids_BT, document_BT, target_BT = rows(way)
    if way.fused_head and not way.padding and not way.packing:
        total = sum(
            model(ids[None, :-1], score=CrossEntropy(ids[1:], torch.ones(len(ids) - 1, device=device)))
            for ids in (ids.to(device) for ids in documents())
        )
    else:
        scored_N = (target_BT >= 0).flatten().nonzero()[:, 0]
        target_N = target_BT.flatten()[scored_N]
        scored = None if len(scored_N) == target_BT.numel() else scored_N.to(device)
        more = {} if device == CPU else {"cu_seqlens_S": cu_seqlens(document_BT).to(device)}
        weight_N = torch.ones(len(target_N)).to(device)
        ids_BT, document_BT, target_N = (x.to(device) for x in (ids_BT, document_BT, target_N))
        score = CrossEntropyOfTwo(target_N, target_N, weight_N) if way.two else CrossEntropy(target_N, weight_N)
        total = model(ids_BT, document_BT, scored_N=scored, score=score, **more)
        total = total.mean() if way.two else total
    loss = total / sum(LENGTHS)
    scale = 1024.0 if way.dtype == torch.float16 else 1.0
    (loss * scale).backward()
    gradient, wanted = flat(model).cpu() / scale, reference[1]
    assert abs(loss.item() - reference[0]) <= way.loss
    assert float((gradient - wanted).norm() / wanted.norm()) <= way.gradient
