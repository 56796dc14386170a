"""LoRA and DoRA adapters in the format of the `peft` library, which transformers, vLLM and llama.cpp's converter read.

A folder with adapter_config.json and adapter_model.safetensors. What the format can say and we do not compute is
refused by name. We add penjing_adapter.json, which holds the hash of the base; other programs pass it over.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from penjing.base.errors import UserError
from penjing.base.files import atomic_write, read_json, write_json
from penjing.convert.names import hf_name
from penjing.model.lora import Adapter, AdapterSize, adaptable, adapted, attach
from penjing.model.transformer import Transformer

CONFIG, WEIGHTS, FACTS = "adapter_config.json", "adapter_model.safetensors", "penjing_adapter.json"
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_magnitude_vector": "magnitude"}
# Settings that say nothing about what an adapter computes once it is learned, or that are read below.
_READ = {
    "peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "rank_pattern",
    "alpha_pattern", "target_modules", "init_lora_weights",
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "ensure_weight_tying",
    "target_parameters",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "velora_config",
}  # fmt: skip
# Of these classes `peft` takes every layer whose name ends in gate_proj, up_proj or down_proj for the fused routed
# experts (version 0.21), the dense layers' and the shared experts' too. Naming the layer's weight instead is not so
# read, and other programs go by the names of the tensors, which are the same.
_TAKEN_FOR_EXPERTS = ("qwen3_moe", "glm4_moe")
# Ways of drawing A and B that leave the base's weights as they are; others (pissa, olora, loftq ...) change them.
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftAdapter:
    """An adapter read from a folder: tensors by `peft`'s name of the layer (model.layers.0.self_attn.q_proj) and part
    (A, B, magnitude), and what is multiplied. Its base's hash is there if penjing wrote it."""

    folder: Path
    tensors: dict[str, dict[str, Tensor]]
    sizes: dict[str, AdapterSize]
    base_name: str
    base_sha256: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """Whether it learned from conversations."""
        return self.facts.get("learned_from") == "chats"


def write_peft(
    folder: Path, model: Transformer, name: str, *, base_name: str, base_sha256: str = "", facts: Mapping[str, Any] = {}
) -> None:
    """Write the adapter `name` of `model` to `folder`.

    base_name: the Hugging Face directory or hub name of the base. facts: further JSON values about where it came from.
    Raises UserError if the disk refuses, and for a folder with an adapter that was not written here.
    """
    folder = Path(folder)
    if (folder / CONFIG).exists() and not (folder / FACTS).exists():
        raise UserError("holds an adapter of another program", where=folder, next_step="Choose another folder.")
    layers = {layer: module for layer, module in adapted(model).items() if name in module.adapters}
    assert layers, f"no adapter is called {name}"
    architecture = model.config.architecture
    tensors: dict[str, Tensor] = {}
    for layer, module in layers.items():
        adapter, theirs = module.adapter(name), _PREFIX + hf_name(layer + ".", architecture)
        tensors[f"{theirs}lora_A.weight"], tensors[f"{theirs}lora_B.weight"] = adapter.A, adapter.B
        if adapter.magnitude is not None:
            tensors[f"{theirs}lora_magnitude_vector"] = adapter.magnitude
    sizes = {_layer_name(layer, architecture): module.adapter(name).size for layer, module in layers.items()}
    by_weight = {layer for layer in sizes if ".mlp." in layer} if architecture in _TAKEN_FOR_EXPERTS else set()
    if any(sizes[layer].use_dora for layer in by_weight):
        raise UserError(
            f"peft has no way to name DoRA in the feed-forward layers of {architecture}",
            where=folder,
            next_step="Use it here, merge it, or train with lora.target_modules=attention.*_proj.",
        )
    whole = {key: value.detach().float().cpu().contiguous() for key, value in tensors.items()}
    with atomic_write(folder / WEIGHTS) as stream:
        stream.write(safetensors.torch.save(whole, metadata={"format": "pt"}))
    write_json(folder / FACTS, {**facts, "base": base_name, "base_sha256": base_sha256})
    write_json(folder / CONFIG, _config(model, sizes, by_weight, base_name))


def _layer_name(layer: str, architecture: str) -> str:
    return hf_name(layer + ".", architecture).removesuffix(".")


def _config(
    model: Transformer, sizes: Mapping[str, AdapterSize], by_weight: set[str], base_name: str
) -> dict[str, Any]:
    """adapter_config.json. by_weight: layers to name by their weight.

    Every scale is written as alpha = scale x rank: the same number without the rank-stabilised square root, read alike
    by programs that do not know that option.
    """
    first = next(iter(sizes.values()))
    alpha = {layer: _plain_number(size.scale * size.rank) for layer, size in sizes.items()}
    standard = alpha[next(iter(sizes))]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": first.rank,
        "lora_alpha": standard,
        "lora_dropout": 0.0 if by_weight else first.dropout,  # refused there, and of no effect in use
        "use_rslora": False,
        "use_dora": first.use_dora,
        "target_modules": _targets(model, set(sizes) - by_weight),
        "target_parameters": sorted(f"{layer}.weight" for layer in by_weight) or None,
        "rank_pattern": {layer: size.rank for layer, size in sizes.items() if size.rank != first.rank},
        "alpha_pattern": {layer: value for layer, value in alpha.items() if value != standard},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
    }


def _plain_number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _targets(model: Transformer, layers: set[str]) -> list[str]:
    """The shortest names that mean exactly these layers: q_proj where every block's is adapted, else whole names.

    In a mixture the experts' own layers end in gate_proj too, so names there say which part of the block is meant.
    """
    every = {_layer_name(layer, model.config.architecture) for layer in adaptable(model)}
    depth = 2 if model.config.is_mixture else 1
    short = {".".join(layer.split(".")[3:][-depth:]) for layer in layers}
    meant = {layer for layer in every if any(layer.endswith("." + name) for name in short)}
    return sorted(short if meant == layers else layers)


def read_peft(folder: Path) -> PeftAdapter:
    """Read a LoRA or DoRA adapter made by `peft` or by us. Raises UserError for what we do not compute, by name."""
    folder = Path(folder)
    where = folder / CONFIG
    if not where.is_file():
        raise UserError("not the folder of an adapter", where=folder, wanted=f"{CONFIG} and {WEIGHTS} in it")
    config = read_json(where)
    _check(config, where)
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        why = "is pickled, which could run code" if pickled else "has no weights"
        raise UserError(f"the adapter {why}", where=folder, wanted=WEIGHTS, next_step="Save it as safetensors.")
    try:
        found = safetensors.torch.load_file(folder / WEIGHTS)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=folder / WEIGHTS) from None
    tensors: dict[str, dict[str, Tensor]] = {}
    for key, value in found.items():
        part = next((part for part in _PARTS if key.endswith(part)), None)
        if part is None or not key.startswith(_PREFIX):
            raise UserError("a tensor that is not part of LoRA or DoRA", where=folder / WEIGHTS, got=key)
        layer = key.removeprefix(_PREFIX).removesuffix(part)
        tensors.setdefault(layer, {})[_PARTS[part]] = value.float()
    wanted = {"A", "B", "magnitude"} if config.get("use_dora") else {"A", "B"}
    for layer, parts in tensors.items():
        if parts.keys() != wanted:
            raise UserError(
                "an adapter's parts do not belong together", where=folder / WEIGHTS, got=f"{layer}: {sorted(parts)}"
            )
    facts = read_json(folder / FACTS) if (folder / FACTS).is_file() else {}
    return PeftAdapter(
        folder=folder,
        tensors=tensors,
        sizes={layer: _size(config, layer, parts["A"].shape[0]) for layer, parts in tensors.items()},
        base_name=str(config.get("base_model_name_or_path") or ""),
        base_sha256=str(facts.get("base_sha256", "")),
        facts=facts,
    )


def _check(config: Any, where: Path) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        got = config.get("peft_type") if isinstance(config, dict) else None
        raise UserError("this kind of adapter is not supported", where=where, got=got, wanted="LORA")
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        raise UserError(
            "this start changes the base's weights, so the adapter does not fit the base alone",
            where=f"{where}: init_lora_weights",
            got=json.dumps(start),
            next_step="Save it with peft's option that converts it to plain LoRA, or merge it there.",
        )
    for name, value in config.items():
        if name in _READ or not value or (name == "bias" and value == "none"):
            continue
        raise UserError("not supported", where=f"{where}: {name}", got=json.dumps(value, ensure_ascii=False))


def _size(config: Mapping[str, Any], layer: str, rank: int) -> AdapterSize:
    alpha = float(_by_pattern(config.get("alpha_pattern") or {}, layer, config.get("lora_alpha", 8)))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    dropout = float(config.get("lora_dropout") or 0.0)
    return AdapterSize(rank=rank, scale=scale, dropout=dropout, use_dora=bool(config.get("use_dora")))


def _by_pattern(patterns: Mapping[str, Any], layer: str, standard: Any) -> Any:
    """The value of the first pattern that is the end of the layer's name, as `peft` reads its patterns."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return standard


@torch.no_grad()
def attach_peft(model: Transformer, name: str, adapter: PeftAdapter) -> None:
    """Give `model` the adapter under `name`; `set_adapter` turns it on. Raises UserError where it does not fit."""
    where = adapter.folder / WEIGHTS
    layers = adaptable(model)
    ours = {_layer_name(layer, model.config.architecture): layer for layer in layers}
    for theirs, parts in adapter.tensors.items():
        if theirs not in ours:
            wanted = f"a layer such as {next(iter(ours))}"
            raise UserError("the model has no such linear layer", where=where, got=theirs, wanted=wanted)
        layer = layers[ours[theirs]]
        got = [parts["B"].shape[0], parts["A"].shape[1]]
        if got != [layer.out_features, layer.in_features] or parts["B"].shape[1] != parts["A"].shape[0]:
            raise UserError(
                "the adapter is of another shape of model",
                where=where,
                got=f"{theirs} {got}",
                wanted=[layer.out_features, layer.in_features],
            )
    attach(model, name, {ours[theirs]: size for theirs, size in adapter.sizes.items()})
    made = {layer: module.adapter(name) for layer, module in adapted(model).items() if name in module.adapters}
    for theirs, parts in adapter.tensors.items():
        _fill(made[ours[theirs]], parts)


def _fill(adapter: Adapter, parts: Mapping[str, Tensor]) -> None:
    adapter.A.copy_(parts["A"])
    adapter.B.copy_(parts["B"])
    if adapter.magnitude is not None:
        adapter.magnitude.copy_(parts["magnitude"].flatten())
