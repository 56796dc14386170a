"""The feed-forward half of a block: SwiGLU (arXiv:2002.05202, equation 6), down(silu(gate x) * up x)."""

from torch import Tensor, nn

from penjing.kernels import ops
from penjing.model.config import ModelConfig
from penjing.model.linear import Linear, plain_weight, shared_input_linears


class MLP(nn.Module):
    """x_BTD -> x_BTD through an inner width F."""

    def __init__(self, config: ModelConfig, size: int = 0) -> None:
        """size: F; 0 = the configuration's `intermediate_size`."""
        super().__init__()
        size = size or config.intermediate_size
        self.gate_proj = Linear(config.hidden_size, size)
        self.up_proj = Linear(config.hidden_size, size)
        self.down_proj = Linear(size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_and_up = shared_input_linears(x_BTD, self.gate_proj, self.up_proj, consumer="swiglu")
        return ops.swiglu_linear(gate_and_up, self.down_proj, plain_weight(self.down_proj))
