"""A `Forward` in C for CPUs (kernels/cpu/decode.py): packs the weights once, then makes one call per pass."""

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from penjing import devices
from penjing.infer.forward import active_adapter, bytes_per_slot
from penjing.kernels.cpu import library
from penjing.kernels.cpu.decode import Decoder, DecoderWeights, Experts, LayerWeights, LowRank, Matrix, Shape
from penjing.kernels.cpu.ops import TYPES
from penjing.model import lora
from penjing.model.block import Block
from penjing.model.linear import Linear
from penjing.model.lora import AdaptedLinear
from penjing.model.mlp import MLP
from penjing.model.moe import MoELayer, moe_layers
from penjing.model.norm import RMSNorm
from penjing.model.rope import rotary_table
from penjing.model.transformer import Transformer


def supports(model: Transformer) -> str:
    """Why the C kernels cannot run this model; empty if they can."""
    if not devices.of(model.embed.weight.device).is_host:
        return "the model is not on a CPU"
    if reason := library.unavailable_decode_reason():
        return f"the C kernels for this CPU are not available: {reason}"
    dtypes = {_precision(model), *(parameter.dtype for parameter in model.parameters())} - TYPES.keys()
    if dtypes:
        return f"the C kernels take float32 and bfloat16, not {str(dtypes.pop()).removeprefix('torch.')}"
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return "the weights are not plain tensors"
    if any(isinstance(layer.shared_gate, AdaptedLinear) for layer in moe_layers(model)):
        return "there is an adapter on the shared expert's gate"
    return ""


def _precision(model: Transformer) -> torch.dtype:
    return model.compute_dtype or model.embed.weight.dtype


class CpuForward:
    """A model in C. Later changes of the weights have no effect: they are packed here. Results are batch-invariant."""

    batch_invariant = True

    def __init__(
        self, model: Transformer, *, num_slots: int, max_tokens: int, weights: Literal["auto", "int8"] = "auto"
    ) -> None:
        """weights: int8 quantises all matrices except the router and the embedding; auto: the model's own dtype."""
        config = model.config
        self.num_slots, self.max_tokens, self.vocab_size = num_slots, max_tokens, config.vocab_size
        self.adapters = lora.names(model)
        self.active_adapter = active_adapter(model, self.adapters)
        self._decoder = Decoder(
            Shape(
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                epsilon=config.rms_norm_eps,
                num_chosen=config.num_experts_per_tok,
                sigmoid=config.architecture == "glm4_moe",
                norm_topk_prob=config.norm_topk_prob,
                routed_scaling_factor=config.routed_scaling_factor,
            ),
            _weights(model, self.adapters, max_tokens),
            precision=torch.int8 if weights == "int8" else _precision(model),
            cache_dtype=_precision(model),
            num_slots=num_slots,
            max_tokens=max_tokens,
        )
        self.device = devices.HOST
        self.bytes_per_slot = bytes_per_slot(config, max_tokens, _precision(model))
        self.copy_prefix = self._decoder.copy_prefix

    def clear(self, slot: int) -> None:
        """The kernels read no position that the sequence has not written."""

    def close(self) -> None:
        """Free the packed weights and the cache."""
        del self._decoder, self.copy_prefix

    def __call__(
        self,
        slot_N: np.ndarray,
        position_N: np.ndarray,
        id_N: np.ndarray,
        logits_index_R: np.ndarray,
        adapter_N: np.ndarray | None = None,
    ) -> Tensor:
        if adapter_N is None and self.active_adapter >= 0:
            adapter_N = np.full(len(slot_N), self.active_adapter, dtype=np.int32)
        return self._decoder(slot_N, position_N, id_N, logits_index_R, adapter_N)


@torch.no_grad()
def _weights(model: Transformer, adapters: tuple[str, ...], max_tokens: int) -> DecoderWeights:
    cosine, sine = rotary_table(torch.arange(max_tokens)[None], model.config)
    return DecoderWeights(
        embedding_VD=model.embed.weight,
        head_VD=model.head_weight_VD,
        gain_D=model.norm.weight,
        layers=[_layer(block, adapters, model.config.window(index)) for index, block in enumerate(model.blocks)],
        cosine_SN=cosine[0, :, 0],
        sine_SN=sine[0, :, 0],
    )


def _layer(block: nn.Module, adapters: tuple[str, ...], window: int) -> LayerWeights:
    assert isinstance(block, Block)
    attention = block.attention
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases: list[Tensor] = [layer.bias for layer in projections if layer.bias is not None]
    norms = [norm.weight if isinstance(norm, RMSNorm) else None for norm in (attention.q_norm, attention.k_norm)]
    mixture = block.mlp if isinstance(block.mlp, MoELayer) else None
    dense = block.mlp if mixture is None else mixture.shared
    return LayerWeights(
        attention_gain_D=block.input_norm.weight,
        mlp_gain_D=block.mlp_norm.weight,
        qkv=_matrix(projections, adapters),
        out=_matrix((attention.o_proj,), adapters),
        gate_up=_matrix((dense.gate_proj, dense.up_proj), adapters, pairs=True) if isinstance(dense, MLP) else None,
        down=_matrix((dense.down_proj,), adapters) if isinstance(dense, MLP) else None,
        qkv_bias_O=torch.cat(biases) if biases else None,
        query_gain_K=norms[0],
        key_gain_K=norms[1],
        experts=None if mixture is None else _experts(mixture),
        window=window,
    )


def _experts(mixture: MoELayer) -> Experts:
    return Experts(
        router_ED=mixture.router.weight,
        gate_EFD=mixture.gate_proj,
        up_EFD=mixture.up_proj,
        down_EDF=mixture.down_proj,
        correction_E=mixture.router.correction,
        shared_gate_D=None if mixture.shared_gate is None else mixture.shared_gate.weight[0],
    )


def _matrix(layers: tuple[Linear, ...], adapters: tuple[str, ...], *, pairs: bool = False) -> Matrix:
    return Matrix(
        weights_OI=[layer.weight for layer in layers],
        adapters=[[_low_rank(layer, name) for layer in layers] for name in adapters],
        pairs=pairs,
    )


def _low_rank(layer: Linear, name: str) -> LowRank | None:
    if not isinstance(layer, AdaptedLinear) or name not in layer.adapters:
        return None
    adapter = layer.adapter(name)
    return LowRank(a_RI=adapter.A, b_OR=adapter.B, scale=adapter.size.scale, gain_O=adapter.gain(layer.weight))
