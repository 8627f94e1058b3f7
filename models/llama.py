"""LLaMA 3 (arXiv 2407.21783) and Qwen 3 (arXiv 2505.09388) in Flax Linen, in their released sizes, and their kin.

Fields of `Config` make it LLaMA 1 to 3, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi-3, OLMo 2, SmolLM 3 or Granite, of any
size: `models.from_huggingface` reads them from a config.json.

A module of models has `PRESETS`, configurations by name, and `build(config)`, which returns a model.

Shapes: B batch, S sequence, D width, F hidden width of the feed-forward, H heads, K key-value heads, E head dim, V
vocabulary. `x_BxSxD` is an array of these dims.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .layers.activations import gelu, silu
from .layers.attention import Implementation, attention, split_heads
from .layers.checks import check_at_least_one, check_length, check_multiple
from .layers.kv_cache import attention_with_variables
from .layers.norms import RMSNorm
from .layers.rotary import RopeScaling, frequencies, rotate
from .llama_names import huggingface, huggingface_config, huggingface_fields

__all__ = ["PRESETS", "Attention", "Block", "Config", "FeedForward", "Llama", "RopeScaling", "build", "decoder",
           "huggingface", "huggingface_config", "huggingface_fields", "tensor_rules"]

INIT = nn.initializers.normal(0.02)
ACTIVATIONS = {"silu": silu, "gelu": gelu}


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder with rotary positions, grouped-query attention, RMSNorm and a gated feed-forward.

    num_kv_heads: shared by num_heads / num_kv_heads query heads each. hidden: width of the feed-forward. tied: the
    output layer is the embedding. epsilon: of the norms. dtype: of the computation; None: that of the parameters.
    attention: its kernel. That, scan_layers and remat are as in `models.gpt2`. family: the `model_type` of its
    checkpoints; None: llama, or qwen3 with qk_norm.

    Positions. rope_scaling: None: none. rotary_share: of each head, its first dims, that is rotated. rope_layers:
    whether each layer has positions at all; None: all have. local_rope_theta: of the layers with a window, whose
    frequencies are not scaled; None: as the others.

    Attention. qk_norm: queries and keys are normalised in each head, as in Qwen 3; "all": over all heads at once, as in
    OLMo 2. qkv_bias, proj_bias: of the kernels before and after it. attention_scale: of the scores; None: 1 /
    sqrt(head_dim). attention_softcap: scores become cap * tanh(scores / cap). window: tokens that one sees, itself
    included; None: all before it. window_layers: whether each layer has the window; None: all have.

    Blocks. norms: "pre": of what attention and feed-forward read, "post": of what they return, or "both".
    norm_offset: is added to the stored scales, 1 for Gemma. activation: of the gate, "gelu" by tanh. mlp_bias: of the
    feed-forward's kernels. fused: one kernel of q, k and v, and one of gate and up, as in Phi-3. embedding_scale,
    residual_scale: by which embeddings, and what is added to the residual stream, are multiplied. logits_divisor: of
    the logits; logits_softcap: as that of the scores.

    Raises ValueError for invalid sizes.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    hidden: int
    head_dim: int = 128
    vocab_size: int = 128256
    max_length: int = 8192
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool | Literal["all"] = False
    tied: bool = False
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    attention: Implementation = None
    scan_layers: bool = True
    remat: bool = False
    family: str | None = None
    rotary_share: float = 1.0
    rope_layers: tuple[bool, ...] | None = None
    local_rope_theta: float | None = None
    qkv_bias: bool = False
    proj_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    norms: Literal["pre", "post", "both"] = "pre"
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu"] = "silu"
    mlp_bias: bool = False
    fused: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float | None = None

    def __post_init__(self):
        check_at_least_one(self, "num_layers", "width", "num_heads", "num_kv_heads", "hidden", "head_dim",
                           "vocab_size", "max_length")
        check_multiple(self, "num_heads", "num_kv_heads")
        if self.rotary_dim < 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            what = f"head_dim={self.head_dim}"
            what += "" if self.rotary_share == 1 else f" times rotary_share={self.rotary_share}"
            raise ValueError(f"{what} is odd: rotary positions rotate pairs.")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1.")
        for name in ("rope_layers", "window_layers"):
            if (layers := getattr(self, name)) is not None and len(layers) != self.num_layers:
                raise ValueError(f"{name} has {len(layers)} layers, and num_layers={self.num_layers}.")
        for name, known in (("norms", ("pre", "post", "both")), ("activation", tuple(ACTIVATIONS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {known}.")

    @property
    def rotary_dim(self) -> int:
        """The dims of each head that are rotated."""
        return int(self.head_dim * self.rotary_share)

    @property
    def num_params(self) -> int:
        """Number of parameters, exactly. A tied output layer counts once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.width * (q + kv) + self.qkv_bias * (q + 2 * kv) + self.proj_bias * self.width
        attention += q + kv if self.qk_norm == "all" else 2 * self.head_dim * bool(self.qk_norm)
        feed_forward = 3 * self.width * self.hidden + self.mlp_bias * (2 * self.hidden + self.width)
        norms = (4 if self.norms == "both" else 2) * self.width
        return (self.num_layers * (attention + feed_forward + norms) + self.width
                + (2 - self.tied) * self.vocab_size * self.width)


class Layer(NamedTuple):
    """What of attention differs between layers. window: as in `Config`. frequency, amplitude: as for `rotate`."""

    window: Any
    frequency: Any
    amplitude: Any


def layer_of(config: Config, layer: int, length: int) -> Layer:
    """That of one layer, for texts of `length` tokens."""
    c = config
    has_window = c.window is not None and (c.window_layers is None or c.window_layers[layer])
    theta, scaling = c.rope_theta, c.rope_scaling
    if has_window and c.local_rope_theta is not None:
        theta, scaling = c.local_rope_theta, None
    frequency = frequencies(c.rotary_dim, theta, scaling, length)
    if c.rope_layers is not None and not c.rope_layers[layer]:
        frequency, scaling = np.zeros_like(frequency), None  # a rotation by 0
    window = c.window if has_window and c.window is not None and c.window < length else None  # else it sees all
    return Layer(window, frequency, 1.0 if scaling is None else scaling.attention_factor)


def layers_of(config: Config, length: int) -> Layer | None:
    """The layers' own, stacked; None where all are alike. A layer without a window has one that no text reaches."""
    layers = [layer_of(config, layer, length) for layer in range(config.num_layers)]
    if len({(each.window, each.frequency.tobytes(), each.amplitude) for each in layers}) == 1:
        return None
    windows = [each.window for each in layers]
    return Layer(np.array([each or 1 << 30 for each in windows], np.int32) if any(windows) else None,
                 np.stack([each.frequency for each in layers]),
                 np.array([each.amplitude for each in layers], np.float32))


def rotated(q: jax.Array, k: jax.Array, positions_BxS: jax.Array, layer: Layer) -> tuple[jax.Array, jax.Array]:
    """Queries and keys with their rotary positions."""
    turn = functools.partial(rotate, positions_BxS=positions_BxS, frequency=layer.frequency, amplitude=layer.amplitude)
    return turn(q), turn(k)


def scores_of(config: Config, layer: Layer) -> dict[str, Any]:
    """How `attention` computes its scores."""
    return {"scale": config.attention_scale, "window": layer.window, "softcap": config.attention_softcap}


def mixed(config: Config, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids_BxS: jax.Array | None, layer: Layer
          ) -> jax.Array:
    """Causal attention of rotated heads, (B, S, H or K, E), giving (B, S, H x E)."""
    segment_ids = None if segment_ids_BxS is None else (segment_ids_BxS, segment_ids_BxS)
    return attention(q, k, v, causal=True, segment_ids=segment_ids, implementation=config.attention,
                     **scores_of(config, layer))


def dense(config: Config, outputs: int, name: str, bias: bool) -> nn.Dense:
    """A kernel, with a bias or without."""
    return nn.Dense(outputs, use_bias=bias, dtype=config.dtype, kernel_init=INIT, name=name)


def norm(config: Config, name: str) -> RMSNorm:
    """A norm over the last dim."""
    return RMSNorm(epsilon=config.epsilon, dtype=config.dtype, offset=config.norm_offset, name=name)


class Attention(nn.Module):
    """Grouped-query self-attention, (B, S, D) to the same. cache_length: as in `Llama`."""

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None,
                 layer: Layer | None = None) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        if layer is None:
            layer = layer_of(c, 0, self.cache_length or x_BxSxD.shape[1])
        q_BxSxHxE, k_BxSxKxE, v_BxSxKxE = self._heads(x_BxSxD)
        if c.qk_norm is True:
            q_BxSxHxE, k_BxSxKxE = norm(c, "q_norm")(q_BxSxHxE), norm(c, "k_norm")(k_BxSxKxE)
        q_BxSxHxE, k_BxSxKxE = rotated(q_BxSxHxE, k_BxSxKxE, positions_BxS, layer)
        if self.cache_length:
            out = attention_with_variables(self, q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, self.cache_length,
                                           **scores_of(c, layer))
        else:
            out = mixed(c, q_BxSxHxE, k_BxSxKxE, v_BxSxKxE, segment_ids_BxS, layer)
        return dense(c, c.width, "proj", c.proj_bias)(out)

    def _heads(self, x_BxSxD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, S, H, E), keys and values (B, S, K, E)."""
        c = self.config
        if c.fused:  # columns are (K, its H / K queries | key | value, E), so that shards have whole heads
            groups = c.num_heads // c.num_kv_heads
            qkv = dense(c, (groups + 2) * c.num_kv_heads * c.head_dim, "qkv", c.qkv_bias)(x_BxSxD)
            qkv = qkv.reshape(*x_BxSxD.shape[:2], c.num_kv_heads, groups + 2, c.head_dim)
            q = qkv[..., :groups, :].reshape(*x_BxSxD.shape[:2], c.num_heads, c.head_dim)
            return q, qkv[..., groups, :], qkv[..., groups + 1, :]
        q, k, v = (dense(c, heads * c.head_dim, name, c.qkv_bias)(x_BxSxD) for name, heads in (
            ("q", c.num_heads), ("k", c.num_kv_heads), ("v", c.num_kv_heads)))
        if c.qk_norm == "all":
            q, k = norm(c, "q_norm")(q), norm(c, "k_norm")(k)
        return split_heads(q, c.num_heads), split_heads(k, c.num_kv_heads), split_heads(v, c.num_kv_heads)


class FeedForward(nn.Module):
    """A gated feed-forward, (B, S, D) to the same. A layer of experts takes its place."""

    config: Config

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array) -> jax.Array:
        """What is added to the residual stream."""
        c = self.config
        if c.fused:  # columns are (F, gate | up), as above
            both = dense(c, 2 * c.hidden, "gate_up", c.mlp_bias)(x_BxSxD).reshape(*x_BxSxD.shape[:2], c.hidden, 2)
            gate, up = both[..., 0], both[..., 1]
        else:
            gate, up = (dense(c, c.hidden, name, c.mlp_bias)(x_BxSxD) for name in ("gate", "up"))
        hidden_BxSxF = ACTIVATIONS[c.activation](gate) * up
        return dense(c, c.width, "down", c.mlp_bias)(hidden_BxSxF)


class Block(nn.Module):
    """One layer, (B, S, D) to the same; the None is for `nn.scan`. cache_length: as in `Llama`."""

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, x_BxSxD: jax.Array, positions_BxS: jax.Array, segment_ids_BxS: jax.Array | None,
                 layer: Layer | None = None) -> tuple[jax.Array, None]:
        """The residual stream after this layer."""
        c = self.config

        def before(x: jax.Array, name: str) -> jax.Array:
            return x if c.norms == "post" else norm(c, name)(x)

        def added(x: jax.Array, name: str) -> jax.Array:
            x = x if c.norms == "pre" else norm(c, f"{name}_post")(x)
            return x if c.residual_scale == 1.0 else x * jnp.asarray(c.residual_scale, x.dtype)

        attend = Attention(c, self.cache_length, name="attn")
        x_BxSxD += added(attend(before(x_BxSxD, "ln_1"), positions_BxS, segment_ids_BxS, layer), "ln_1")
        return x_BxSxD + added(FeedForward(c, name="mlp")(before(x_BxSxD, "ln_2")), "ln_2"), None


class Llama(nn.Module):
    """Tokens, int (B, S), to logits (B, S, V) in the dtype of the computation.

    cache_length: above 0, the tokens follow those of earlier calls, whose keys and values are in the collection
    `cache`: at most so many in all.
    """

    config: Config
    cache_length: int = 0

    @nn.compact
    def __call__(self, tokens_BxS: jax.Array, *, segment_ids: jax.Array | None = None,
                 positions: jax.Array | None = None, logits: bool = True) -> Any:
        """segment_ids: int (B, S), the document of each packed token; positions: int (B, S), its place in that.

        logits: False returns their factors: features (B, S, D) and the table (V, D).

        Raises ValueError for more than `max_length` tokens, and for factors of capped logits.
        """
        c = self.config
        check_length(c, tokens_BxS)
        if c.logits_softcap is not None and not logits:
            raise ValueError(f"logits_softcap={c.logits_softcap}: capped logits are no product of features and a "
                             "table: use a loss of logits, without tiles of the vocabulary.")
        if self.cache_length:
            length = self.variable("cache", "length", jnp.zeros, (), jnp.int32)
            positions = length.value + jnp.arange(tokens_BxS.shape[-1])[None]
            length.value += tokens_BxS.shape[-1]
        positions_BxS = jnp.arange(tokens_BxS.shape[-1])[None] if positions is None else positions
        embed = nn.Embed(c.vocab_size, c.width, dtype=c.dtype, embedding_init=INIT, name="wte")
        x_BxSxD = embed(tokens_BxS)
        if c.embedding_scale != 1.0:
            x_BxSxD *= jnp.asarray(c.embedding_scale, x_BxSxD.dtype)
        block = nn.remat(Block, prevent_cse=not c.scan_layers) if c.remat and not self.cache_length else Block
        layers = layers_of(c, self.cache_length or tokens_BxS.shape[-1])
        if c.scan_layers:
            stack = nn.scan(block, variable_axes={"params": 0, "cache": 0}, split_rngs={"params": True},
                            in_axes=(nn.broadcast, nn.broadcast,  # pyright: ignore[reportArgumentType]
                                     nn.broadcast if layers is None else 0), length=c.num_layers)
            x_BxSxD, _ = stack(c, self.cache_length, name="blocks")(x_BxSxD, positions_BxS, segment_ids, layers)
        else:
            for layer in range(c.num_layers):
                own = jax.tree.map(lambda leaf, layer=layer: leaf[layer], layers)
                x_BxSxD, _ = block(c, self.cache_length, name=f"blocks_{layer}")(
                    x_BxSxD, positions_BxS, segment_ids, own)
        x_BxSxD = norm(c, "ln_f")(x_BxSxD)
        if c.logits_divisor != 1.0:
            x_BxSxD /= jnp.asarray(c.logits_divisor, x_BxSxD.dtype)
        table = embed if c.tied else nn.Embed(
            c.vocab_size, c.width, dtype=c.dtype, embedding_init=INIT, name="lm_head")
        if not logits:
            return x_BxSxD, table.embedding
        logits_BxSxV = table.attend(x_BxSxD)
        return logits_BxSxV if c.logits_softcap is None else c.logits_softcap * jnp.tanh(
            logits_BxSxV / c.logits_softcap)


def build(config: Config) -> Llama:
    """The model of `config`."""
    return Llama(config)


def decoder(config: Config, length: int | None = None) -> Llama:
    """The model as it generates, as in `models.gpt2`.

    Raises ValueError for more tokens than dynamic frequencies have before they change, as cached keys would have to.
    """
    limit = config.max_length
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        limit = min(limit, config.rope_scaling.original_max_length)
        if length is not None and length > limit:
            raise ValueError(f"{length} tokens: with dynamic frequencies a cache is for {limit}: generate fewer.")
    return Llama(config, cache_length=length or limit)


def tensor_rules(config: Config) -> list[tuple[str, Any, int | None]]:
    """How the axis `tensor` shards parameters, as in Megatron-LM: pattern, spec of the last dims, heads or None."""
    columns, rows, bias = (None, "tensor"), ("tensor", None), ("tensor",)
    heads = {"qkv": config.num_kv_heads} if config.fused else {"q": config.num_heads, "[kv]": config.num_kv_heads}
    gates = "gate_up" if config.fused else "(gate|up)"
    rules: list[tuple[str, Any, int | None]] = [
        *((f"attn/{name}/kernel", columns, num_heads) for name, num_heads in heads.items()),
        ("attn/proj/kernel", rows, config.num_heads), (f"mlp/{gates}/kernel", columns, None),
        ("mlp/down/kernel", rows, None), ("(wte|lm_head)/embedding", rows, None)]
    if config.qkv_bias:
        rules += [(f"attn/{name}/bias", bias, num_heads) for name, num_heads in heads.items()]
    return rules + [(f"mlp/{gates}/bias", bias, None)] * config.mlp_bias


def _llama(num_layers: int, width: int, num_heads: int, hidden: int, **changes: Any) -> Config:
    return Config(num_layers, width, num_heads, 8, hidden, remat=True, **changes)


def _qwen3(num_layers: int, width: int, num_heads: int, hidden: int, tied: bool) -> Config:
    return Config(num_layers, width, num_heads, 8, hidden, vocab_size=151936, max_length=40960, rope_theta=1e6,
                  qk_norm=True, tied=tied, epsilon=1e-6, remat=True)


_LONG: dict[str, Any] = {"max_length": 131072, "rope_scaling": RopeScaling()}
_SMALL: dict[str, Any] = {"max_length": 131072, "rope_scaling": RopeScaling(32.0), "tied": True}

# Published sizes: the config.json of each checkpoint at meta-llama/ and Qwen/.
PRESETS: dict[str, Config] = {
    "tiny": Config(2, 64, 4, 2, 128, head_dim=16, vocab_size=256, max_length=64, rope_theta=1e4),
    "bytes": Config(2, 192, 4, 2, 512, head_dim=48, vocab_size=256, max_length=512, rope_theta=1e4, tied=True),
    # To be trained on a laptop: scripts/training/language_model.py.
    "11m": Config(6, 384, 6, 2, 1024, head_dim=64, vocab_size=4096, max_length=1024, rope_theta=1e4, tied=True),
    "3-8b": _llama(32, 4096, 32, 14336),
    "3-70b": _llama(80, 8192, 64, 28672),
    "3.1-8b": _llama(32, 4096, 32, 14336, **_LONG),
    "3.1-70b": _llama(80, 8192, 64, 28672, **_LONG),
    "3.1-405b": _llama(126, 16384, 128, 53248, **_LONG),
    "3.2-1b": _llama(16, 2048, 32, 8192, head_dim=64, **_SMALL),
    "3.2-3b": _llama(28, 3072, 24, 8192, **_SMALL),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, False),
}
