"""Adapters in the format of `peft`: equal logits both ways, equal losses over twenty steps, refusals by name."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from small_models import sizes
from user_errors import raises_user_error

from penjing.base.errors import UserError
from penjing.convert.hf_config import hf_config
from penjing.convert.names import to_hf
from penjing.convert.peft import attach_peft, read_peft, write_peft
from penjing.model import lora
from penjing.model.config import ModelConfig
from penjing.model.lora import Lora, add_adapter, set_adapter
from penjing.model.score import CrossEntropy
from penjing.model.transformer import Transformer

transformers = pytest.importorskip("transformers")

SHAPE = {**sizes(61, 24, 2, 4, 2, 8, 40), "rope_theta": 1e4, "tie_word_embeddings": False}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
IDS_BT = torch.randint(61, (4, 16), generator=torch.Generator().manual_seed(1))
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def peft():
    """Not above: it takes seconds, and every process that runs tests reads this file."""
    return pytest.importorskip("peft")


@pytest.fixture
def pair(tmp_path):
    """A random model, and the same one as a Hugging Face directory with the stock class loaded from it."""

    def make(architecture="qwen3", **more):
        model = Transformer(ModelConfig(**{**SHAPE, "architecture": architecture, **more}))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if "norm" not in name and "correction" not in name:
                    value.normal_(0, 0.2, generator=generator)
        folder = tmp_path / "base"
        folder.mkdir()
        tokenizer = SimpleNamespace(end_of_text=0, message_end=1)
        (folder / "config.json").write_text(json.dumps(hf_config(model.config, tokenizer)))
        import safetensors.torch

        tensors = {name: value.detach().contiguous() for name, value in to_hf(model.state_dict(), model.config).items()}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return model.eval(), theirs, folder

    return make


@torch.no_grad()
def stir(parameters, seed=3):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))


def check_equal(model, theirs):
    with torch.no_grad():
        ours, wanted = model(IDS_BT), theirs(IDS_BT).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    set_adapter(model, None)
    with torch.no_grad():
        assert (model(IDS_BT) - wanted).abs().max() > 0.05


SETTINGS = {
    "standard": Lora(rank=4),
    "rank_stabilised": Lora(rank=3, alpha=4, use_rslora=True),
    "dora": Lora(rank=4, alpha=8, use_dora=True),
    "some_layers": Lora(rank=4, target_modules=("blocks.1.*", "attention.q_proj")),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "qwen2"])
def test_ours_in_peft(pair, tmp_path, name, architecture, peft):
    model, theirs, folder = pair(architecture)
    add_adapter(model, SETTINGS[name])
    stir(parameter for parameter in model.parameters() if parameter.requires_grad)
    write_peft(tmp_path / "adapter", model, "default", base_name=str(folder))
    check_equal(model, peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval())


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("glm4_moe", {**MOE, "mlp_only_layers": (0,)}),
        ("qwen2_moe", MOE),
        ("glm4_moe", {**MOE, "shared_expert_intermediate_size": 32}),
        ("qwen3_moe", {**MOE, "shared_expert_intermediate_size": 0, "mlp_only_layers": (1,)}),
        ("mixtral", {**MOE, "shared_expert_intermediate_size": 0}),
    ],
)
def test_mixtures_in_peft(pair, tmp_path, architecture, more, peft):
    model, theirs, folder = pair(architecture, **more)
    add_adapter(model, Lora(rank=4))
    stir(parameter for parameter in model.parameters() if parameter.requires_grad)
    write_peft(tmp_path / "adapter", model, "default", base_name=str(folder))
    check_equal(model, peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval())
    again = read_peft(tmp_path / "adapter")
    attach_peft(model, "again", again)
    with torch.no_grad():
        set_adapter(model, "default")
        expected = model(IDS_BT)
        set_adapter(model, "again")
        assert torch.equal(model(IDS_BT), expected)


THEIRS = {
    "standard": {},
    "rank_stabilised": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 6}, "alpha_pattern": {"mlp.*": 5}},
    "few": {"target_modules": ["v_proj"], "layers_to_transform": [1]},
    "regex": {"target_modules": r".*\.0\..*(q|up)_proj"},
}


@pytest.mark.parametrize("name", THEIRS)
def test_pefts_here(pair, tmp_path, name, peft):
    model, theirs, _ = pair()
    given = {"r": 4, "lora_alpha": 12, "target_modules": PROJECTIONS, "task_type": "CAUSAL_LM", **THEIRS[name]}
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**given)).eval()
    stir(parameter for parameter in theirs.parameters() if parameter.requires_grad)
    theirs.save_pretrained(tmp_path / "theirs")
    attach_peft(model, "theirs", read_peft(tmp_path / "theirs"))
    set_adapter(model, "theirs")
    check_equal(model, theirs)


@pytest.mark.parametrize("name", ["standard", "rank_stabilised", "dora"])
def test_twenty_steps_lose_what_pefts_do(pair, tmp_path, name, peft):
    """Same base, same A and B, same batches, AdamW in float32: losses equal within 1e-4 at each of 20 steps."""
    model, theirs, folder = pair("qwen3")
    add_adapter(model, SETTINGS[name])
    write_peft(tmp_path / "adapter", model, "default", base_name=str(folder))
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter", is_trainable=True)
    batches = torch.randint(61, (2, 4, 17), generator=torch.Generator().manual_seed(2))
    ours_learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    theirs_learned = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
    assert sum(map(torch.numel, ours_learned)) == sum(map(torch.numel, theirs_learned))
    settings = {"lr": 3e-3, "weight_decay": 0.01}
    optimizers = [torch.optim.AdamW(learned, **settings) for learned in (ours_learned, theirs_learned)]
    losses = []
    for step in range(20):
        ids_BT = batches[step % 2]
        target_N = ids_BT[:, 1:].flatten()
        ours = model(ids_BT[:, :-1], score=CrossEntropy(target_N, torch.ones(len(target_N)))) / len(target_N)
        logits = theirs(ids_BT[:, :-1]).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target_N)
        losses.append((ours.item(), wanted.item()))
        ours.backward()
        wanted.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert max(abs(ours - wanted) for ours, wanted in losses) < 1e-4, losses
    assert losses[-1][0] < losses[0][0] - 0.05


@pytest.fixture
def written(pair, tmp_path):
    """A written adapter and its model; the config can be changed."""
    model, _, _ = pair()
    add_adapter(model, Lora(rank=4))
    folder = tmp_path / "adapter"
    write_peft(folder, model, "default", base_name="base", base_sha256="abc", extra={"step": 3})
    config = json.loads((folder / "adapter_config.json").read_text())
    return model, folder, lambda **more: (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))


def test_an_adapter_of_another_program_is_not_replaced(written, tmp_path):
    model, folder, _ = written
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "adapter_config.json").write_text("{}")
    with raises_user_error(where="theirs", next_step="another folder"):
        write_peft(theirs, model, "default", base_name="base")
    assert [path.name for path in theirs.iterdir()] == ["adapter_config.json"]
    before = sorted(folder.iterdir())
    write_peft(folder, model, "default", base_name="base")  # its own may be written anew
    assert sorted(folder.iterdir()) == before


def test_the_bases_hash_is_recorded(written):
    _, folder, _ = written
    adapter = read_peft(folder)
    assert (adapter.base_name, adapter.base_sha256, adapter.metadata["step"]) == ("base", "abc", 3)


def test_layers_are_named_shortly_where_that_means_the_same(written):
    _, folder, _ = written
    config = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(PROJECTIONS)


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ({"peft_type": "IA3"}, {"got": "IA3"}),
        ({"modules_to_save": ["lm_head"]}, {"where": "modules_to_save"}),
        ({"bias": "all"}, {"where": "bias"}),
        ({"init_lora_weights": "pissa"}, {"where": "init_lora_weights", "got": "pissa"}),
        ({"layer_replication": [[0, 1]]}, {"where": "layer_replication"}),
        ({"fan_in_fan_out": True}, {"where": "fan_in_fan_out"}),
        ({"use_something_new": True}, {"where": "use_something_new"}),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(written, wrong, facts):
    _, folder, write = written
    write(**wrong)
    with raises_user_error(**facts):
        read_peft(folder)


def test_magnitudes_in_a_mixtures_mlp_are_refused(pair, tmp_path):
    model, _, _ = pair("glm4_moe", **MOE)
    add_adapter(model, Lora(rank=4, use_dora=True))
    with raises_user_error(next_step="merge it"):
        write_peft(tmp_path / "adapter", model, "default", base_name="base")
    assert not (tmp_path / "adapter").exists()


def test_adapters_on_routed_experts_are_refused_by_name(pair, tmp_path, peft):
    model, theirs, _ = pair("qwen3_moe", **{**MOE, "shared_expert_intermediate_size": 0})
    given = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    peft.get_peft_model(theirs, peft.LoraConfig(**given, task_type="CAUSAL_LM")).save_pretrained(tmp_path / "theirs")
    with raises_user_error(where="adapter_model.safetensors", got="model.layers.0.mlp.experts"):
        attach_peft(model, "theirs", read_peft(tmp_path / "theirs"))


def test_folders_that_are_no_adapters(written, tmp_path):
    _, folder, _ = written
    with raises_user_error(wanted="adapter_config.json"):
        read_peft(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with raises_user_error(where="adapter", wanted="adapter_model.safetensors"):
        read_peft(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="cannot be read"):
        read_peft(folder)


def test_an_adapter_of_another_shape(written):
    _, folder, _ = written
    other = Transformer(ModelConfig(**{**SHAPE, "hidden_size": 32}))
    with raises_user_error(where="adapter_model.safetensors", got="model.layers.0.mlp.down_proj [24, 40]"):
        attach_peft(other, "x", read_peft(folder))
    shorter = Transformer(ModelConfig(**{**SHAPE, "num_hidden_layers": 1}))
    with raises_user_error(where="adapter_model.safetensors", got="model.layers.1.mlp.down_proj"):
        attach_peft(shorter, "x", read_peft(folder))
    assert not lora.names(shorter)
