"""Decoding with graphs gives what eager decoding gives, in whatever order slots come and go. Without a GPU, a recorder
that runs the same function on the same static tensors takes the place of CUDA's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import small_model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.devices.cpu import Cpu
from penjing.devices.cuda import Cuda, Recorder
from penjing.infer import decode_graphs
from penjing.infer.decode_graphs import max_padding, num_keys, num_rows
from penjing.infer.engine import Engine
from penjing.infer.forward import ints
from penjing.infer.generate import generate
from penjing.infer.requests import Request
from penjing.infer.sample import Sampling
from penjing.infer.torch_forward import TorchForward
from penjing.model.cast_cache import casted_weights
from penjing.model.linear import set_compute_dtype
from penjing.model.lora import AdapterSize, adaptable, attach, set_adapter
from penjing.plan.memory.device_target import Target
from penjing.plan.memory.fake_device_mode import FakeDeviceMode

VOCAB, TOKENS = 48, 300
DRAWN = Sampling(temperature=1.0)
NO_GPU = not torch.cuda.is_available()


class FakeRecorder:
    """Captures a function, which must leave no result, and runs it again at each replay."""

    captured, replays, error = 0, 0, None

    def __init__(self, device):
        pass

    def warm_up(self, run):
        run()

    def capture(self, run):
        type(self).captured += 1
        if self.error is not None:
            raise self.error
        return run

    def replay(self, recording):
        type(self).replays += 1
        recording()


@pytest.fixture
def recorder(monkeypatch):
    """Graphs on a CPU, captured the second time."""

    class Fresh(FakeRecorder):
        pass

    monkeypatch.setattr(Cpu, "recorder", lambda self, device: Fresh(device))
    monkeypatch.setattr(decode_graphs, "unavailable_reason", decode_graphs.unsupported_reason)
    monkeypatch.setattr(decode_graphs, "CAPTURE_AFTER", 1)
    return Fresh


def model_of(**changes):
    shape = {
        "seed": 3, "noise": 0.1, "sharpen": 4, "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": TOKENS,
        "rope_theta": 1e4, "tie_word_embeddings": False,
    }  # fmt: skip
    return small_model(**{**shape, **changes}).eval()


SHAPES = {
    "qwen3": {},
    "window": {"architecture": "qwen2", "sliding_window": 60},
    "rope": {"rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_max_position_embeddings": 150},
}


def requests(count, *, seed=0, sampling=DRAWN, **options):
    """Prompts of many lengths, some of which begin alike, with answers that cross 128 and 256 tokens."""
    generator = np.random.default_rng(seed)
    begin = generator.integers(12, VOCAB, 50).tolist()
    return [
        Request(
            prompt=begin * (number % 3 == 0) + generator.integers(12, VOCAB, generator.integers(1, 150)).tolist(),
            max_new_tokens=int(generator.integers(1, 90)), stop={5}, sampling=sampling, **options,
        )
        for number in range(count)
    ]  # fmt: skip


def answers(model, asked, *, graphs, slots=6, cancel=()):
    """Token ids and log-probabilities of each request. cancel: by request, after how many steps."""
    found = {}
    forward = TorchForward(model, num_slots=slots, max_tokens=TOKENS, graphs=graphs)
    with Engine(forward, prefill_chunk=64) as engine:
        for request in asked:
            found[engine.submit(request)] = ([], [])
        while not engine.idle:
            for request_id in [number for number, step in cancel if step == engine.steps]:
                engine.cancel(request_id)
            for event in engine.step():
                if event.token is not None:
                    found[event.request_id][0].append(event.token.id)
                    found[event.request_id][1].append(event.token.logp)
    return found


def assert_same(found, expected):
    assert {number: ids for number, (ids, _) in found.items()} == {number: ids for number, (ids, _) in expected.items()}
    for number, (_, logp) in found.items():
        np.testing.assert_allclose(logp, expected[number][1], atol=5e-5)


@pytest.mark.parametrize(
    ("shape", "sampling"),
    [
        *(pytest.param(shape, DRAWN, id=f"{shape}-drawn") for shape in SHAPES),
        *(pytest.param(shape, Sampling(), id=f"{shape}-greedy", marks=pytest.mark.nightly) for shape in SHAPES),
    ],
)
def test_answers_are_those_of_eager_decoding(recorder, shape, sampling):
    """More requests than slots, copied prefixes, cancelled ones, answers that outgrow a graph's keys."""
    model, asked = model_of(**SHAPES[shape]), requests(20, sampling=sampling)
    cancel = [(3, 9), (7, 30), (12, 31)]
    expected = answers(model, asked, graphs=False, cancel=cancel)
    assert not recorder.replays
    assert_same(answers(model, asked, graphs=True, cancel=cancel), expected)
    assert recorder.captured > 2 and recorder.replays > 10 * recorder.captured


@pytest.mark.parametrize("slots", [1, 9, *(pytest.param(slots, marks=pytest.mark.nightly) for slots in (2, 5, 17))])
def test_any_number_of_slots(recorder, slots):
    model, asked = model_of(), requests(2 * slots + 1, seed=slots)
    assert_same(answers(model, asked, graphs=True, slots=slots), answers(model, asked, graphs=False, slots=slots))
    assert recorder.replays


def test_adapters(recorder):
    """Passes of one adapter have graphs of their own; passes of several are eager."""
    torch.manual_seed(0)
    model = model_of()
    sizes = {name: AdapterSize(rank=2, scale=1.0) for name in adaptable(model)}
    for number, name in enumerate(("one", "two")):
        attach(model, name, sizes, seed=number)
    for name, value in model.named_parameters():
        if name.endswith(".B"):
            torch.nn.init.normal_(value, std=0.1)
    set_adapter(model, "one")
    for names in ([None], [""], ["two"], ["one", "two", "", None]):
        asked = [ask for name in names for ask in requests(3, adapter=name)]
        replays = recorder.replays
        expected = answers(model, asked, graphs=False)
        assert recorder.replays == replays
        assert_same(answers(model, asked, graphs=True), expected)
        assert recorder.replays > replays or len(names) > 1


def test_models_that_are_not_captured(recorder):
    experts = model_of(architecture="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    dora = model_of()
    attach(dora, "one", {name: AdapterSize(rank=2, scale=1.0, use_dora=True) for name in adaptable(dora)})
    asked = requests(3)
    for model in (experts, dora):
        assert_same(answers(model, asked, graphs=True), answers(model, asked, graphs=False))
    assert not recorder.captured


def test_without_cuda_there_are_no_graphs():
    assert decode_graphs.unavailable_reason(model_of())


def test_a_failed_capture_is_one_warning(recorder):
    model, asked = model_of(), requests(8)
    expected = answers(model, asked, graphs=False)
    recorder.error = RuntimeError("operation not permitted when stream is capturing")
    with pytest.warns(UserWarning, match="not permitted") as caught:
        found = answers(model, asked, graphs=True)
    assert_same(found, expected)
    assert len(caught) == recorder.captured == 1 and not recorder.replays


@pytest.mark.parametrize("stale", ["input", "output"])
def test_a_replay_that_disagrees_is_one_warning(recorder, monkeypatch, stale):
    """As if the graph read the inputs of its capture again, or wrote its results elsewhere."""
    model, asked = model_of(), requests(8)
    expected = answers(model, asked, graphs=False)
    decode_rows, inputs = TorchForward._decode_rows, []

    def read_first(self, input_3B, key):
        inputs.append(input_3B.clone())
        return decode_rows(self, inputs[0] if recorder.is_replaying else input_3B, key)

    def replay(self, recording):
        recorder.replays += 1
        recorder.is_replaying = True
        if stale == "input":
            recording()
        recorder.is_replaying = False

    recorder.is_replaying = False
    monkeypatch.setattr(recorder, "replay", replay)
    monkeypatch.setattr(TorchForward, "_decode_rows", read_first)
    with pytest.warns(UserWarning, match="differed") as caught:
        found = answers(model, asked, graphs=True, slots=1)
    assert_same(found, expected)
    assert len(caught) == 1 and recorder.replays == 1


def test_a_wrong_replay_leaves_the_cache_right(recorder, monkeypatch):
    """A replay that writes wrong keys and values is found before they are read."""
    model = model_of()
    forwards = [TorchForward(model, num_slots=2, max_tokens=64, graphs=graphs) for graphs in (True, False)]

    def replay(self, recording):
        forwards[0]._cache.key_LBGSK[:, :, :, 2] = 9.0  # position 2, which the pass writes

    monkeypatch.setattr(recorder, "replay", replay)

    def compare_answers():
        for position in range(6):
            args = (ints([0, 1]), ints([position] * 2), ints([7, 8]), ints([0, 1]))
            found, expected = (forward(*args) for forward in forwards)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    with pytest.warns(UserWarning, match="differed"):
        compare_answers()


def test_sizes():
    assert [num_rows(count) for count in (1, 2, 3, 5, 8, 9, 16, 17, 250, 256)] == [1, 2, 4, 8, 8, 16, 16, 32, 256, 256]
    assert [max_padding(slots) for slots in (1, 2, 3, 5, 9, 17, 256)] == [0, 0, 1, 3, 7, 15, 15]
    assert [num_keys(tokens, 4096) for tokens in (1, 128, 129, 300, 4096)] == [128, 128, 256, 512, 4096]
    assert num_keys(3, 64) == 64 and num_keys(2000, 1504) == 1504


def test_logits_of_some_rows_and_of_mixed_passes(recorder):
    """Rows in any order of slots; a pass that also prefills; logits of few rows."""
    model, generator = model_of(), np.random.default_rng(0)
    forwards = [TorchForward(model, num_slots=5, max_tokens=64, graphs=graphs) for graphs in (True, False)]
    length_S = np.zeros(5, dtype=np.int64)
    for step in range(40):
        slots = generator.permutation(5)[: generator.integers(1, 6)]
        count_B = np.where(generator.random(len(slots)) < 0.1 * (step % 4 == 0), 3, 1)
        slot_N = np.repeat(slots, count_B)
        position_N = np.concatenate([length_S[slot] + np.arange(n) for slot, n in zip(slots, count_B, strict=True)])
        index_R = np.sort(generator.permutation(len(slot_N))[: generator.integers(1, len(slot_N) + 1)])
        id_N = generator.integers(0, VOCAB, len(slot_N))
        found, expected = (forward(slot_N, position_N, id_N, index_R) for forward in forwards)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        length_S[slots] += count_B
        if step % 9 == 8:
            source, target = generator.permutation(5)[:2].tolist()
            for forward in forwards:
                forward.copy_prefix(source, target, int(length_S[source]) // 2)
            length_S[target] = length_S[source] // 2
    assert recorder.replays > 10


# --- what a capture forbids -------------------------------------------------------------------------------------------


class Breaks(TorchFunctionMode):
    """Notes what a capture forbids: values that go to the host or come from there, and shapes that the data decide."""

    FORBIDDEN = (
        *("tensor", "as_tensor", "from_numpy", "item", "tolist", "numpy", "cpu", "cuda", "pin_memory"),
        *("__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique", "bincount"),
    )

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if name in self.FORBIDDEN or "rand" in name or any(x.device.type == "cpu" for x in tensors):
            self.seen.append(name)
        return out


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_nothing_in_a_pass_breaks_a_capture(shape, dtype, adapted):
    """On tensors that report a GPU and have no values, which take the paths that they would take there."""
    model = model_of(**SHAPES[shape])
    if adapted:
        attach(model, "one", {name: AdapterSize(rank=2, scale=1.0) for name in adaptable(model)})
        set_adapter(model, "one")
    set_compute_dtype(model, dtype)
    with FakeDeviceMode(Target(capability=(9, 0))):
        forward = TorchForward(model.to("cuda"), num_slots=4, max_tokens=TOKENS, graphs=False)
        if dtype == torch.bfloat16:  # cast once, not in every pass
            assert {cast.dtype for cast in casted_weights(model)} == {dtype}
            assert adapted or len(casted_weights(model)) > 7 * len(model.blocks)
        static_3B = torch.zeros(3, 4, dtype=torch.long, device="cuda")
        with torch.no_grad(), Breaks() as breaks:
            decoded = forward._decode_rows(static_3B, decode_graphs.Key(4, 128, forward.active_adapter))
            assert decoded.logits_BV.device.type == "cuda" and decoded.logits_BV.shape == (4, VOCAB)
            assert not breaks.seen
            float(decoded.logits_BV[0, 0])
            torch.tensor([1], device="cuda")
            assert breaks.seen == ["__float__", "tensor"]
        forward.close()


# --- on a GPU ---------------------------------------------------------------------------------------------------------


class CountingRecorder(Recorder):
    """CUDA's, which counts."""

    captured = replays = 0

    def capture(self, run):
        CountingRecorder.captured += 1
        return super().capture(run)

    def replay(self, recording):
        CountingRecorder.replays += 1
        super().replay(recording)


@pytest.fixture
def counted(monkeypatch):
    """Graphs of a GPU, captured the second time; a warning, as of a failed capture, is an error."""
    monkeypatch.setattr(Cuda, "recorder", lambda self, device: CountingRecorder(device))
    monkeypatch.setattr(decode_graphs, "CAPTURE_AFTER", 1)
    CountingRecorder.captured = CountingRecorder.replays = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield CountingRecorder


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs CUDA")
@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_on_a_gpu_answers_are_those_of_eager_decoding(counted, shape, sampling):
    model, asked = model_of(**SHAPES[shape]).cuda(), requests(20, sampling=sampling)
    cancel = [(3, 9), (7, 30), (12, 31)]
    expected = answers(model, asked, graphs=False, cancel=cancel)
    assert not counted.captured
    assert_same(answers(model, asked, graphs=True, cancel=cancel), expected)
    assert counted.captured > 2 and counted.replays > 10 * counted.captured


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_a_gpu_logits_in_half_precision(counted, dtype):
    """The same tokens through both; sums in another order round differently."""
    model, generator = model_of().cuda(), np.random.default_rng(0)
    set_compute_dtype(model, dtype)
    forwards = [TorchForward(model, num_slots=5, max_tokens=TOKENS, graphs=graphs) for graphs in (True, False)]
    for position in range(TOKENS):
        args = (ints(range(5)), ints([position] * 5), generator.integers(0, VOCAB, 5), ints(range(5)))
        found, expected = (forward(*args) for forward in forwards)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    assert counted.captured == 3 and counted.replays > TOKENS - 10


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs CUDA")
def test_on_a_gpu_several_models_and_engines_at_once(counted):
    """Each has graphs of its own; one that is closed takes nothing from the others."""
    models = [model_of(seed=seed).cuda() for seed in (3, 4)]
    asked = requests(6, sampling=Sampling())
    expected = [answers(model, asked, graphs=False) for model in models]
    first = TorchForward(models[0], num_slots=2, max_tokens=TOKENS)
    for model, each in zip(models, expected, strict=True):
        assert_same(answers(model, asked, graphs=True), each)
    first.close()
    assert_same(answers(models[0], asked, graphs=True), expected[0])


@pytest.mark.gpu
@pytest.mark.skipif(NO_GPU, reason="needs CUDA")
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_on_a_gpu_greedy_text_is_that_of_transformers(counted, architecture):
    transformers = pytest.importorskip("transformers")
    model = model_of(architecture=architecture)
    written = hf_config(model.config, SimpleNamespace(end_of_text=0, message_end=1, begin=0, pad=0, stop={0}))
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict(to_hf(model.state_dict(), model.config))
    prompts = [request.prompt for request in requests(6)]
    ours = generate(model.cuda(), prompts, max_new_tokens=100, stop=())
    assert counted.replays > 90
    for prompt, answer in zip(prompts, ours, strict=True):
        ids_BT = torch.tensor([prompt], device="cuda")
        text_BT = theirs.cuda().generate(ids_BT, max_new_tokens=100, do_sample=False, eos_token_id=None)
        assert text_BT[0, len(prompt) :].tolist() == answer
