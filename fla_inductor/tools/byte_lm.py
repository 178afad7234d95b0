"""A small language model on bytes: blocks of Kimi Delta Attention and a SwiGLU MLP."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fla_inductor.layers import KDACache, KimiDeltaAttention

VOCABULARY = 256


@dataclasses.dataclass(frozen=True)
class ByteLMConfig:
    """Sizes of a `ByteLM`."""

    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 64
    mlp_size: int = 256


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ByteLMConfig, layer_idx: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention_norm = nn.RMSNorm(size)
        self.attention = KimiDeltaAttention(
            hidden_size=size, head_dim=config.head_dim, num_heads=config.num_heads, layer_idx=layer_idx
        )
        self.mlp_norm = nn.RMSNorm(size)
        self.mlp = SwiGLU(size, config.mlp_size)

    def forward(self, x: Tensor, cache: KDACache | None) -> Tensor:
        attended, _, _ = self.attention(self.attention_norm(x), past_key_values=cache, use_cache=cache is not None)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """Predicts the next byte; the output layer is the transposed embedding."""

    def __init__(self, config: ByteLMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        nn.init.normal_(self.embedding.weight, std=config.hidden_size**-0.5)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, tokens: Tensor, cache: KDACache | None = None) -> Tensor:
        """Logits [B, T, 256] of the bytes that follow `tokens` [B, T]; `cache` is continued and updated if given."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy, in nats, of each byte of `tokens` [B, T + 1] given those before it."""
        logits = self(tokens[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, length: int, temperature: float = 0.0) -> tuple[Tensor, Tensor]:
        """Continue `prompt` [B, T] by `length` bytes, one recurrent step each.

        The bytes are the likeliest ones, or with a `temperature` drawn from softmax(logits / temperature).

        Returns the bytes [B, length] and the logits [B, length, 256] that they were chosen from.
        """
        cache = KDACache()
        inputs, tokens, logits = prompt, [], []
        for _ in range(length):
            last = self(inputs, cache)[:, -1]
            if temperature:
                inputs = torch.multinomial(F.softmax(last.float() / temperature, -1), 1)
            else:
                inputs = last.argmax(-1, keepdim=True)
            tokens.append(inputs)
            logits.append(last)
        return torch.cat(tokens, 1), torch.stack(logits, 1)
