"""LoRA and DoRA adapters in the format of the `peft` library, which transformers, vLLM and llama.cpp's converter read.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. A setting that we do not compute is an
error that names it. We add penjing_adapter.json with the hash of the base model; other programs ignore it.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import atomic_write, read_json, write_json
from penjing.checkpoint.load import read_tensors
from penjing.convert import minimind
from penjing.convert.names import hf_name
from penjing.model.lora import AdapterSize, adaptable, adapted, attach
from penjing.model.transformer import Transformer

CONFIG, WEIGHTS, METADATA = "adapter_config.json", "adapter_model.safetensors", "penjing_adapter.json"
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_magnitude_vector": "magnitude"}
# Settings that are read below, or that do not change what a trained adapter computes.
_SUPPORTED_FIELDS = {
    "peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern",
    "alpha_pattern", "target_modules", "init_lora_weights",
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "ensure_weight_tying",
    "target_parameters",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "velora_config",
}  # fmt: skip
# In these classes `peft` (version 0.21) takes every layer named gate_proj, up_proj or down_proj for fused experts, even
# in dense layers and shared experts. Naming the layer's weight (target_parameters) avoids that. Other programs use the
# names of the tensors, which are the same.
_MLP_TAKEN_FOR_EXPERTS = ("qwen3_moe", "glm4_moe")
# Initializations of A and B that leave the base weights unchanged; others (pissa, olora, loftq ...) change them.
_BASE_PRESERVING_INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter read from a folder or a file. tensors: by the layer's name in `peft` (model.layers.0.self_attn.q_proj)
    and part (A, B, magnitude). base_sha256: empty unless penjing wrote the adapter."""

    folder: Path
    tensors: dict[str, dict[str, Tensor]]
    sizes: dict[str, AdapterSize]
    base_name: str
    base_sha256: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat_tuned(self) -> bool:
        return self.metadata.get("learned_from") == "chats"


def write_peft(
    folder: Path, model: Transformer, name: str, *, base_name: str, base_sha256: str = "", extra: Mapping[str, Any] = {}
) -> None:
    """Write the adapter `name` of `model` to `folder`.

    base_name: the Hugging Face directory or hub name of the base. extra: further JSON values on its origin.
    Raises UserError if the disk refuses, or if the folder holds an adapter of another program.
    """
    folder = Path(folder)
    if (folder / CONFIG).exists() and not (folder / METADATA).exists():
        raise UserError("holds an adapter of another program", where=folder, next_step="Choose another folder.")
    layers = {layer: module for layer, module in adapted(model).items() if name in module.adapters}
    assert layers, f"no adapter is called {name}"
    architecture = model.config.architecture
    tensors: dict[str, Tensor] = {}
    for layer, module in layers.items():
        adapter, prefix = module.adapter(name), _PREFIX + hf_name(layer + ".", architecture)
        tensors[f"{prefix}lora_A.weight"], tensors[f"{prefix}lora_B.weight"] = adapter.A, adapter.B
        if adapter.magnitude is not None:
            tensors[f"{prefix}lora_magnitude_vector"] = adapter.magnitude
    sizes = {_layer_name(layer, architecture): module.adapter(name).size for layer, module in layers.items()}
    weight_targets = {layer for layer in sizes if ".mlp." in layer} if architecture in _MLP_TAKEN_FOR_EXPERTS else set()
    if any(sizes[layer].use_dora for layer in weight_targets):
        what = f"peft cannot express DoRA in the feed-forward layers of {architecture}"
        hint = "Use it here, merge it, or train with lora.target_modules=attention.*_proj."
        raise UserError(what, where=folder, next_step=hint)
    state_dict = {key: value.detach().float().cpu().contiguous() for key, value in tensors.items()}
    with atomic_write(folder / WEIGHTS) as stream:
        stream.write(safetensors.torch.save(state_dict, metadata={"format": "pt"}))
    write_json(folder / METADATA, {**extra, "base": base_name, "base_sha256": base_sha256})
    write_json(folder / CONFIG, _config(model, sizes, weight_targets, base_name))


def _layer_name(layer: str, architecture: str) -> str:
    return hf_name(layer + ".", architecture).removesuffix(".")


def _config(
    model: Transformer, sizes: Mapping[str, AdapterSize], weight_targets: set[str], base_name: str
) -> dict[str, Any]:
    """adapter_config.json. weight_targets: layers to list in target_parameters. Every scale is written as alpha = scale
    x rank. This also covers rank-stabilised LoRA, for programs that do not know that option."""
    first = next(iter(sizes.values()))
    alphas = {layer: size.scale * size.rank for layer, size in sizes.items()}
    alpha = {layer: int(value) if value == int(value) else value for layer, value in alphas.items()}
    default_alpha = alpha[next(iter(sizes))]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": default_alpha,
        "lora_dropout": 0.0 if weight_targets else first.dropout,  # peft refuses dropout there; inference has none
        "use_rslora": False,
        "use_dora": first.use_dora,
        "target_modules": _target_modules(model, set(sizes) - weight_targets),
        "target_parameters": sorted(f"{layer}.weight" for layer in weight_targets) or None,
        "rank_pattern": {layer: size.rank for layer, size in sizes.items() if size.rank != first.rank},
        "alpha_pattern": {layer: value for layer, value in alpha.items() if value != default_alpha},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _target_modules(model: Transformer, layers: set[str]) -> list[str]:
    """The shortest names that match exactly these layers: q_proj if every block's is adapted, else full names. In a
    mixture of experts the experts' layers end in gate_proj too, so names there include the part of the block."""
    all_layers = {_layer_name(layer, model.config.architecture) for layer in adaptable(model)}
    depth = 2 if model.config.is_mixture else 1
    short_names = {".".join(layer.split(".")[3:][-depth:]) for layer in layers}
    matched = {layer for layer in all_layers if any(layer.endswith("." + name) for name in short_names)}
    return sorted(short_names if matched == layers else layers)


def read_peft(folder: Path) -> PeftAdapter:
    """Read a LoRA or DoRA adapter made by `peft` or by us, or a LoRA file of MiniMind. Raises UserError naming a
    setting that we do not support."""
    folder = Path(folder)
    if folder.suffix in minimind.SUFFIXES and not folder.is_dir():
        return _read_minimind(folder)
    config_path = folder / CONFIG
    if not config_path.is_file():
        raise UserError("not the folder of an adapter", where=folder, wanted=f"{CONFIG} and {WEIGHTS} in it")
    config = read_json(config_path)
    _check_config(config, config_path)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        reason = "is pickled, which could run code" if pickled else "has no weights"
        raise UserError(f"the adapter {reason}", where=folder, wanted=WEIGHTS, next_step="Save it as safetensors.")
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, value in read_tensors(folder / WEIGHTS).items():
        part = next((part for part in _PARTS if key.endswith(part)), None)
        if part is None or not key.startswith(_PREFIX):
            raise UserError("a tensor that is not part of LoRA or DoRA", where=folder / WEIGHTS, got=key)
        layer = key.removeprefix(_PREFIX).removesuffix(part)
        tensors.setdefault(layer, {})[_PARTS[part]] = value.float()
    expected_parts = {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    for layer, parts in tensors.items():
        if parts.keys() != expected_parts:
            raise UserError(
                "a layer has the wrong adapter tensors", where=folder / WEIGHTS, got=f"{layer}: {sorted(parts)}"
            )
    metadata = read_json(folder / METADATA) if (folder / METADATA).is_file() else {}
    return PeftAdapter(
        folder=folder,
        tensors=tensors,
        sizes={layer: _adapter_size(config, layer, parts["A"].shape[0]) for layer, parts in tensors.items()},
        base_name=str(config.get("base_model_name_or_path") or ""),
        base_sha256=str(metadata.get("base_sha256", "")),
        metadata=metadata,
    )


def _read_minimind(path: Path) -> PeftAdapter:
    layers = minimind.read_lora(path)
    for layer, parts in layers.items():
        if parts.keys() != {"A", "B"} or not parts["A"].numel():
            raise UserError("a layer has the wrong adapter tensors", where=path, got=f"{layer}: {sorted(parts)}")
    sizes = {layer: AdapterSize(rank=parts["A"].shape[0], scale=1.0) for layer, parts in layers.items()}
    # MiniMind trains adapters on conversations only.
    return PeftAdapter(folder=path, tensors=layers, sizes=sizes, base_name="", metadata={"learned_from": "chats"})


def _check_config(config: Any, where: Path) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        got = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError("this kind of adapter is not supported", where=where, got=got, wanted="LORA")
    init = config.get("init_lora_weights", True)
    if init not in _BASE_PRESERVING_INITS:
        what = "this initialization changes the base weights, so the adapter does not fit the base alone"
        hint = "Save it with peft's option that converts it to plain LoRA, or merge it there."
        raise UserError(what, where=f"{where}: init_lora_weights", got=json.dumps(init), next_step=hint)
    for name, value in config.items():
        if name in _SUPPORTED_FIELDS or not value or (name == "bias" and value == "none"):
            continue
        raise UserError("not supported", where=f"{where}: {name}", got=json.dumps(value, ensure_ascii=False))


def _adapter_size(config: Mapping[str, Any], layer: str, rank: int) -> AdapterSize:
    # Patterns of the end of a layer's name; the first counts, as in `peft`.
    patterns = (config.get("alpha_pattern") or {}).items()
    matching = (value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", layer))
    alpha = float(next(matching, config.get("lora_alpha", 8)))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    dropout = float(config.get("lora_dropout") or 0.0)
    return AdapterSize(rank=rank, scale=scale, dropout=dropout, use_dora=bool(config.get("use_dora")))


@torch.no_grad()
def attach_peft(model: Transformer, name: str, adapter: PeftAdapter) -> None:
    """Attach the adapter to `model` as `name`; `set_adapter` activates it. Raises UserError if it does not fit."""
    where = adapter.folder if adapter.folder.is_file() else adapter.folder / WEIGHTS
    layers = adaptable(model)
    layer_by_hf_name = {_layer_name(layer, model.config.architecture): layer for layer in layers}
    for hf_layer, parts in adapter.tensors.items():
        if hf_layer not in layer_by_hf_name:
            expected = f"a layer such as {next(iter(layer_by_hf_name))}"
            raise UserError("the model has no such linear layer", where=where, got=hf_layer, wanted=expected)
        layer = layers[layer_by_hf_name[hf_layer]]
        shape = [parts["B"].shape[0], parts["A"].shape[1]]
        if shape != [layer.out_features, layer.in_features] or parts["B"].shape[1] != parts["A"].shape[0]:
            what = "the adapter is for a model of another shape"
            raise UserError(
                what, where=where, got=f"{hf_layer} {shape}", wanted=[layer.out_features, layer.in_features]
            )
    num_layers = len({layer.split(".")[2] for layer in adapter.tensors})
    if adapter.folder.is_file() and num_layers != model.config.num_hidden_layers:  # MiniMind adapts every layer
        got, wanted = f"{num_layers} layers", model.config.num_hidden_layers
        raise UserError("the adapter is for a model of another depth", where=where, got=got, wanted=wanted)
    attach(model, name, {layer_by_hf_name[hf_layer]: size for hf_layer, size in adapter.sizes.items()})
    new_adapters = {layer: module.adapter(name) for layer, module in adapted(model).items() if name in module.adapters}
    for hf_layer, parts in adapter.tensors.items():
        new = new_adapters[layer_by_hf_name[hf_layer]]
        new.A.copy_(parts["A"])
        new.B.copy_(parts["B"])
        if new.magnitude is not None:
            new.magnitude.copy_(parts["magnitude"].flatten())
