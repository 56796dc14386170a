"""The forward pass in C: the same bits for a row whatever else is in the pass, and int8 as it is defined."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from penjing.base import c_library
from penjing.kernels.cpu import decode, library
from penjing.kernels.cpu.decode import Decoder, DecoderWeights, Experts, LayerWeights, LowRank, Matrix, Shape

pytestmark = pytest.mark.skipif(
    bool(library.unavailable_decode_reason()), reason=f"no kernels here: {library.unavailable_decode_reason()}"
)
PRECISIONS = [torch.float32, torch.bfloat16, torch.int8]
# Odd numbers of inputs everywhere: bfloat16 has them in pairs.
WIDTH, HEADS, KEY_HEADS, SIZE, INNER, VOCABULARY, TOKENS = 73, 9, 3, 21, 151, 101, 300


def make_decoder(precision, *, experts=False, window=0, adapters=False, slots=20):
    generator = torch.Generator().manual_seed(5)

    def drawn(*shape, scale=None):
        return torch.randn(*shape, generator=generator) * (shape[-1] ** -0.5 if scale is None else scale)

    def matrix(inputs, *outputs, pairs=False):
        given = [LowRank(a_RI=drawn(3, inputs), b_OR=drawn(size, 3), scale=0.7) for size in outputs]
        lists = [[*given[:-1], None], given] if adapters else ()
        weights_OI = [3 * drawn(size, inputs) for size in outputs]
        return Matrix(weights_OI=weights_OI, adapters=lists, pairs=pairs)

    def layer(window):
        mixture = Experts(
            router_ED=drawn(5, WIDTH),
            gate_EFD=3 * drawn(5, 31, WIDTH),
            up_EFD=3 * drawn(5, 31, WIDTH),
            down_EDF=drawn(5, WIDTH, 31),
        )
        return LayerWeights(
            attention_gain_D=1 + drawn(WIDTH, scale=0.1),
            mlp_gain_D=1 + drawn(WIDTH, scale=0.1),
            qkv=matrix(WIDTH, HEADS * SIZE, KEY_HEADS * SIZE, KEY_HEADS * SIZE),
            out=matrix(HEADS * SIZE, WIDTH),
            gate_up=matrix(WIDTH, INNER, INNER, pairs=True),
            down=matrix(INNER, WIDTH),
            query_gain_K=1 + drawn(SIZE, scale=0.1),
            key_gain_K=1 + drawn(SIZE, scale=0.1),
            experts=mixture if experts else None,
            window=window,
        )

    angle_SN = torch.arange(TOKENS)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01])
    return Decoder(
        Shape(
            num_attention_heads=HEADS,
            num_key_value_heads=KEY_HEADS,
            head_dim=SIZE,
            epsilon=1e-6,
            num_chosen=2 * experts,
        ),
        DecoderWeights(
            embedding_VD=drawn(VOCABULARY, WIDTH, scale=1),
            head_VD=drawn(VOCABULARY, WIDTH),
            gain_D=torch.ones(WIDTH),
            layers=[layer(0), layer(window)],
            cosine_SN=angle_SN.cos(),
            sine_SN=angle_SN.sin(),
        ),
        precision=precision,
        cache_dtype=torch.float32 if precision == torch.float32 else torch.bfloat16,
        num_slots=slots,
        max_tokens=TOKENS,
    )


def read(decoder, ids, slot=0, *, chunk=TOKENS, adapter=None):
    """Logits after every token of a prompt, read in chunks."""
    parts = []
    for start in range(0, len(ids), chunk):
        position = np.arange(start, min(start + chunk, len(ids)))
        speaks = None if adapter is None else np.full(len(position), adapter)
        parts.append(
            decoder(np.full(len(position), slot), position, ids[position], np.arange(len(position)), speaks).clone()
        )
    return torch.cat(parts)


@pytest.fixture
def two_threads(monkeypatch):
    monkeypatch.setattr(decode, "MIN_WORK", 1)  # however small
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"experts": True}, {"window": 70}, {"adapters": True}],
    ids=["dense", "experts", "window", "adapters"],
)
def test_a_rows_bits_are_its_own(precision, changes, two_threads):
    decoder = make_decoder(precision, **changes)
    rng = np.random.default_rng(1)
    ids_BT = rng.integers(0, VOCABULARY, (17, 150))
    whose = rng.integers(-1, 2, 17) if changes.get("adapters") else np.full(17, -1)
    alone = read(decoder, ids_BT[0], adapter=whose[0])
    for chunk in (1, 7, 64):
        assert torch.equal(read(decoder, ids_BT[0], slot=3, chunk=chunk, adapter=whose[0]), alone)
    decoder.threads = 1
    assert torch.equal(read(decoder, ids_BT[0], slot=5, adapter=whose[0]), alone)
    decoder.threads = 2
    # 17 sequences in one pass, of other lengths, then each its next token beside the others
    lengths = rng.integers(90, 149, 17)
    lengths[0] = 149
    slot = np.repeat(np.arange(17), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    got = decoder(slot, position, ids_BT[slot, position], np.flatnonzero(slot == 0), whose[slot])
    assert torch.equal(got, alone[:149])
    after = decoder(np.arange(17), lengths, ids_BT[np.arange(17), lengths], np.arange(17), whose)
    assert torch.equal(after[0], alone[149])
    for row in (1, 16):
        assert torch.equal(after[row], read(decoder, ids_BT[row][: lengths[row] + 1], 18, adapter=whose[row])[-1])


def test_no_compilers_choice_of_fused_products_changes_a_rows_bits(monkeypatch, tmp_path, two_threads):
    # GCC fuses fewer products in long chains where it is told that the processor gains by it, as on Sapphire Rapids.
    compiler, openmp = tmp_path / "cc", library.openmp_library()
    compiler.write_text('#!/bin/sh\nexec gcc "$@" --param avoid-fma-max-bits=512\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(c_library, "cache_dir", lambda: tmp_path)
    try:
        built = c_library.load(library._DecodeKernels, str(compiler), [openmp])
    except OSError as error:
        pytest.skip(f"no gcc that knows the option: {error}")
    monkeypatch.setattr(library, "decode_kernels", lambda: built)
    ids = np.random.default_rng(6).integers(0, VOCABULARY, 40)
    for experts in (False, True):
        decoder = make_decoder(torch.float32, experts=experts)
        assert torch.equal(read(decoder, ids, slot=1, chunk=1), read(decoder, ids))


def test_many_rows_and_more_threads_than_cores(two_threads):
    decoder = make_decoder(torch.bfloat16)
    ids = np.random.default_rng(2).integers(0, VOCABULARY, TOKENS)
    alone = read(decoder, ids, chunk=1)
    decoder.threads = 7
    assert torch.equal(read(decoder, ids, slot=2), alone)


@pytest.mark.parametrize("experts", [False, True])
def test_passes_of_other_shapes_one_after_another(experts, two_threads):
    # A thread that is late for one pass must take nothing of the next, which may have other steps.
    decoder = make_decoder(torch.float32, experts=experts)
    ids = np.random.default_rng(8).integers(0, VOCABULARY, 60)
    alone = read(decoder, ids)
    for number in range(300):
        decoder.threads = 1 + number % 4
        count = 1 + number % 59
        wanted = np.arange(0 if number % 7 else count, count)
        got = decoder(np.full(count, 1), np.arange(count), ids[:count], wanted)
        assert torch.equal(got, alone[wanted]), (number, count)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_attention_in_several_steps(precision):
    # One layer of one head whose scores are read off: keys of 150 positions in steps of 64, against torch's softmax.
    size, count = 16, 150
    generator = torch.Generator().manual_seed(2)
    embedding_VD = torch.randn(count, size, generator=generator)
    weights = [(0.5 * torch.randn(size, size, generator=generator)).to(precision).float() for _ in range(3)]
    zeros = Matrix(weights_OI=[torch.zeros(size, size)])
    layer = LayerWeights(
        attention_gain_D=torch.ones(size),
        mlp_gain_D=torch.ones(size),
        qkv=Matrix(weights_OI=weights),
        out=Matrix(weights_OI=[torch.eye(size)]),
        gate_up=Matrix(weights_OI=[torch.zeros(size, size)] * 2, pairs=True),
        down=zeros,
    )
    decoder = Decoder(
        Shape(num_attention_heads=1, num_key_value_heads=1, head_dim=size, epsilon=1e-6),
        DecoderWeights(
            embedding_VD=embedding_VD,
            head_VD=torch.eye(count, size),
            gain_D=torch.ones(size),
            layers=[layer],
            cosine_SN=torch.ones(count, 1),
            sine_SN=torch.zeros(count, 1),
        ),
        precision=precision,
        cache_dtype=precision,
        num_slots=1,
        max_tokens=count,
    )

    def by_torch(dtype):
        normal = functional.rms_norm(embedding_VD, (size,), eps=1e-6).to(dtype)
        query, key, value = ((normal @ weight.to(dtype).T)[None, None] for weight in weights)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)[0, 0]
        return functional.rms_norm(embedding_VD + attended.float(), (size,), eps=1e-6).to(dtype).float()

    got, wanted = read(decoder, np.arange(count))[:, :size], by_torch(torch.float32)
    if precision == torch.float32:
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    else:  # what torch rounds is rounded here, or less; by 2^-9 of it, which way depends on a sum's last bit
        assert (got - wanted).norm() <= 1.1 * (by_torch(precision) - wanted).norm()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_another_sequences_nan_stays_its_own(precision):
    # Of the values of two positions beside each other one may be of an earlier sequence, or of none.
    decoder = make_decoder(precision)
    ids = np.random.default_rng(3).integers(0, VOCABULARY, 40)
    alone = read(decoder, ids, slot=1)
    for chunk in (40, 9, 1):
        decoder.key_LBGTKS.fill_(float("nan"))
        decoder.value_LBGSK.fill_(float("nan"))
        decoder._memory.fill_(255)  # not a number either: what an earlier pass left
        assert torch.equal(read(decoder, ids, slot=0, chunk=chunk), alone)


def test_a_copied_prefix_is_read_on_from():
    decoder = make_decoder(torch.bfloat16)
    ids = np.random.default_rng(4).integers(0, VOCABULARY, 60)
    whole = read(decoder, ids)
    decoder.copy_prefix(0, 9, 37)
    position = np.arange(37, 60)
    assert torch.equal(decoder(np.full(23, 9), position, ids[position], np.arange(23)), whole[37:])


def test_numbers_out_of_range():
    decoder = make_decoder(torch.float32, adapters=True)
    good = {"slot": 0, "position": 0, "id": 0, "wanted": 0, "adapter": 1}
    for name, value in (("slot", 20), ("position", TOKENS), ("id", VOCABULARY), ("wanted", 1), ("adapter", 2)):
        for number in (value, -2 if name != "adapter" else value):
            given = {key: np.array([number if key == name else it]) for key, it in good.items()}
            with pytest.raises(IndexError):
                decoder(given["slot"], given["position"], given["id"], given["wanted"], given["adapter"])
    assert decoder(*(np.zeros(0, np.int32),) * 4).shape == (0, VOCABULARY)


def test_a_forked_process_has_threads_of_its_own(two_threads):
    decoder = make_decoder(torch.float32)
    ids = np.random.default_rng(6).integers(0, VOCABULARY, 50)
    alone = read(decoder, ids)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(read(decoder, ids, slot=1), alone) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(read(decoder, ids, slot=2), alone)


def test_decoders_side_by_side(two_threads):
    ids = np.random.default_rng(7).integers(0, VOCABULARY, 60)
    decoders = [make_decoder(torch.bfloat16) for _ in range(3)]
    alone = read(decoders[0], ids)
    with ThreadPoolExecutor(3) as pool:
        several = pool.map(lambda decoder: [read(decoder, ids, slot, chunk=5) for slot in range(4)], decoders)
        assert all(torch.equal(each, alone) for found in several for each in found)
