"""The arena hands out memory that is nobody else's and takes back what is freed; what is made in it is as elsewhere."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch
import torch.nn.functional as functional
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penjing.kernels.autograd_functions import saves_memory, uses_manual_backward
from penjing.kernels.cpu import tensor_arena as arena
from penjing.kernels.cpu.tensor_arena import LINE, MIN_BYTES, Arena
from penjing.kernels.ops import residual_add
from penjing.model.config import ModelConfig
from penjing.model.init import initialise
from penjing.model.linear import Linear, set_compute_dtype, shared_input_linears
from penjing.model.mlp import MLP
from penjing.model.norm import RMSNorm
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer

SLAB = 64 * MIN_BYTES


def take(room: Arena, num_bytes: int) -> torch.Tensor:
    return room.empty((num_bytes,), torch.uint8)


def taken_bytes(room: Arena) -> int:
    """Bytes that tensors hold now."""
    with room._lock:
        room._collect()
        return sum(block.end - block.start for block in room._taken.values())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))])
def test_no_two_tensors_share_a_byte(seed):
    draw, room, held = random.Random(seed), Arena(SLAB), []
    for number in range(400):
        if held and draw.random() < 0.48:
            tensor, value = held.pop(draw.randrange(len(held)))
            assert (tensor == value).all()
            del tensor
        else:
            tensor = take(room, draw.randint(MIN_BYTES, SLAB // 4)).fill_(number % 251)
            assert tensor.data_ptr() % LINE == 0
            held.append((tensor, number % 251))
            del tensor
    assert taken_bytes(room) == sum(-(-len(tensor) // LINE) * LINE for tensor, _ in held)
    held.clear()
    assert taken_bytes(room) == 0
    assert len(room._starts) == len(room._slabs)  # of each slab all is free, and in one piece


def test_what_was_freed_is_taken_again_however_often():
    room = Arena(SLAB)
    for _ in range(50):
        kept = [take(room, SLAB // 8) for _ in range(8)]  # exactly a slab: with any gap it would take two
        del kept
    assert len(room._slabs) == 1


def test_a_view_keeps_its_memory():
    room = Arena(SLAB)
    view = room.empty((4, MIN_BYTES), torch.float32)[1:2, :7]
    view.fill_(3)
    others = [take(room, MIN_BYTES).fill_(255) for _ in range(40)]
    assert (view == 3).all()
    del view
    assert taken_bytes(room) == len(others) * MIN_BYTES


def test_what_is_larger_than_a_slab_gets_one_of_its_own():
    room = Arena(SLAB)
    assert take(room, 3 * SLAB).fill_(1).sum() == 3 * SLAB
    assert taken_bytes(room) == 0
    assert take(room, SLAB + 1).numel() == SLAB + 1
    assert len(room._slabs) == 1


def test_small_and_empty_tensors_and_dtypes():
    room = Arena(SLAB)
    for shape in ((), (0,), (3, 0, 5), (7, 5), (300, 500)):
        for dtype in (torch.bool, torch.bfloat16, torch.float64):
            made = room.empty(shape, dtype)
            assert (made.shape, made.dtype, made.is_contiguous()) == (torch.Size(shape), dtype, True)


def test_too_much_is_refused_as_memory():
    with pytest.raises(MemoryError):
        take(Arena(SLAB), 1 << 60)


def test_threads_take_and_free_side_by_side():
    room, wrong = Arena(SLAB), []

    def work(number: int) -> None:
        draw = random.Random(number)
        for _ in range(200):
            tensor = take(room, draw.randint(MIN_BYTES, 4 * MIN_BYTES)).fill_(number)
            other = take(room, MIN_BYTES).fill_(number + 100)
            if not (tensor == number).all() or not (other == number + 100).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert taken_bytes(room) == 0


def test_stand_ins_for_tensors_get_stand_ins():
    with FakeTensorMode():
        like = torch.empty(600, 600)
        assert type(arena.empty(like, (400, 400), torch.float32)) is type(like)
    assert arena.empty(torch.empty(2, device="meta"), (400, 400), torch.float32).device.type == "meta"
    before = taken_bytes(arena._arena)
    kept = arena.empty(nn.Parameter(torch.empty(2)), (400, 400), torch.float32)
    assert taken_bytes(arena._arena) - before == kept.numel() * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_waits_for_nobody():
    kept = arena.empty(torch.empty(2), (400, 400), torch.float32).fill_(3)
    with arena._arena._lock:  # as another thread may hold it
        child = os.fork()
        if child == 0:  # ends by the signal if it waits
            signal.alarm(20)
            made = arena.empty(kept, (400, 400), torch.float32).fill_(4)
            os._exit(int(bool((kept != 3).any() or (made != 4).any())))
    assert os.waitpid(child, 0)[1] == 0


def agree(run, plain, tensors):
    """Both give the same and the same gradients of `tensors`."""
    got, wanted = run(), plain()
    upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(7)) for x in wanted]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        torch.autograd.grad(got, tensors, upstream), torch.autograd.grad(wanted, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize("bias", [False, True])
def test_layers_with_one_input(bias):
    layers, x = [Linear(512, size, bias=bias) for size in (96, 32, 32)], drawn(3, 300, 512)
    weights = [each for layer in layers for each in layer.parameters()]
    agree(
        lambda: shared_input_linears(x, *layers),
        lambda: [functional.linear(x, layer.weight, layer.bias) for layer in layers],
        [x, *weights],
    )
    agree(lambda: [layers[0](x)], lambda: [functional.linear(x, layers[0].weight, layers[0].bias)], [x])


def test_layers_that_stay_as_they_are_get_no_gradient():
    layers, x = [Linear(512, 96), Linear(512, 32)], drawn(3, 300, 512)
    layers[0].weight.requires_grad_(False)
    sum(out.sum() for out in shared_input_linears(x, *layers)).backward()
    assert layers[0].weight.grad is None
    torch.testing.assert_close(layers[1].weight.grad, x.sum((0, 1)).expand(32, -1), rtol=1e-4, atol=1e-4)
    wanted = (layers[0].weight.sum(0) + layers[1].weight.sum(0)).expand_as(x)
    torch.testing.assert_close(x.grad, wanted)


class Doubled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_of_another_kind_is_asked_itself():
    x, plain, other = drawn(3, 300, 512), Linear(512, 32), Doubled(512, 96)
    agree(
        lambda: shared_input_linears(x, plain, other),
        lambda: (x @ plain.weight.T, 2 * x @ other.weight.T),
        [x, other.weight],
    )


@pytest.mark.parametrize("needs", ["all", "input", "weight"])
def test_the_mlp_is_its_formula(needs):
    torch.manual_seed(2)
    config = ModelConfig(
        vocab_size=64,
        hidden_size=512,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=640,
    )
    mlp, x = MLP(config), drawn(2, 300, config.hidden_size)
    gate, up, down = (layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    if needs == "weight":
        gate.requires_grad_(False)
        up.requires_grad_(False)
    down.requires_grad_(needs != "input")
    x.requires_grad_(needs != "weight")
    agree(
        lambda: [mlp(x)],
        lambda: [(functional.silu(x @ gate.T) * (x @ up.T)) @ down.T],
        [tensor for tensor in (x, gate, up, down) if tensor.requires_grad],
    )


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_a_norm_beside_its_input(used):
    norm, x = RMSNorm(64, 1e-5), drawn(3, 5000, 64)  # more than a piece
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    plain = functional.rms_norm(x, (64,), norm.weight, 1e-5)
    wanted = [each for each, use in zip((x * 1.0, plain), used, strict=True) if use]
    tensors = [x, norm.weight] if used[1] else [x]
    agree(
        lambda: [each for each, use in zip(norm.forward_with_residual(x), used, strict=True) if use],
        lambda: wanted,
        tensors,
    )


def test_a_sum_keeps_the_wider_dtype():
    x, y = drawn(600, 900), drawn(900, 600).detach().T.bfloat16().requires_grad_()
    total = residual_add(x, y)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, x + y, rtol=0, atol=0)
    total.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * total)
    torch.testing.assert_close(y.grad, (2 * total).bfloat16())
    assert residual_add(y, x).dtype == torch.float32


@pytest.mark.parametrize("num_tokens", [8, 8192])
def test_without_gradients_small_and_large_are_the_same(num_tokens):
    norm, layer, x = RMSNorm(512, 1e-5), Linear(512, 96), drawn(1, num_tokens, 512)
    with_gradients = layer(norm(x))
    with torch.no_grad():
        assert uses_manual_backward(x) == saves_memory(x) == (num_tokens == 8192)
        torch.testing.assert_close(layer(norm(x)), with_gradients)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("experts", [0, 4])
def test_nothing_is_read_before_it_is_written(dtype, experts, monkeypatch):
    mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 352} if experts else {}
    model = Transformer(
        ModelConfig(
            architecture="qwen3_moe" if experts else "qwen3",
            vocab_size=1000,
            hidden_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=704,
            **mixture,
        )
    )
    initialise(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():  # residual outputs begin at zero, and would hide what is before them
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    set_compute_dtype(model, dtype)
    ids_BT = torch.randint(1000, (3, 300), generator=torch.Generator().manual_seed(2))
    document_BT = torch.arange(300).div(70, rounding_mode="floor").expand(3, -1).contiguous()

    def step():
        model.zero_grad(set_to_none=True)
        scored = model(ids_BT, document_BT, score=CrossEntropy(ids_BT.flatten(), torch.ones(900)))
        loss = scored[0] if experts else scored
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    wanted, plain, soiled = step(), Arena.empty, []

    def soil(self, shape, dtype):
        room = plain(self, shape, dtype)
        soiled.append(room.numel())
        return room.fill_(torch.nan) if dtype.is_floating_point else room.fill_(-(2**30))

    monkeypatch.setattr(Arena, "empty", soil)
    for one, other in zip(step(), wanted, strict=True):
        assert torch.equal(one, other)
    assert len(soiled) > 20
