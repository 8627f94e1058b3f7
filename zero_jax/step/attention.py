"""Attention that picks its kernel by the devices of a mesh: cuDNN on GPU, Pallas (splash) on TPU, XLA elsewhere.

A kernel never writes the scores, (batch, heads, queries, keys), to memory. XLA's partitioner knows no Pallas kernel and
would gather its operands, so that it runs inside a `jax.shard_map` over the axes that split the batch, and over
`tensor` and `context` for heads. Where `context` splits the sequence, all-to-alls around the kernel trade it for heads
(DeepSpeed-Ulysses, arXiv 2309.14509); where these do not divide, XLA's attention gathers keys and values.
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax import combinations
from zero_jax.arguments import shown
from zero_jax.errors import UsageError
from zero_jax.sharding.mesh_axes import AxisRoles, MeshAxes
from zero_jax.xla.kernels import CAUSAL_SCOPE
from zero_jax.xla.platform import GPU

Kernel: TypeAlias = Literal["xla", "cudnn", "splash"]
SegmentIds: TypeAlias = tuple[jax.Array, jax.Array]

KERNELS = ("xla", "cudnn", "splash")
_BLOCKS = (512, 256, 128)
"""Rows of queries and keys that a splash kernel holds at once, the first that divides both lengths."""

_initialising = contextvars.ContextVar("initialising", default=False)


@contextlib.contextmanager
def initialising() -> Iterator[None]:
    """Calls are made to initialise a model, in the dtype of its parameters: a given kernel need not take them."""
    token = _initialising.set(True)
    try:
        yield
    finally:
        _initialising.reset(token)


def attention(mesh: Mesh, *, kernel: Kernel | None = None, axis: Any = None, axis_roles: AxisRoles | None = None
              ) -> "Attention":
    """Dot-product attention for models that train on `mesh`, as a function of queries, keys and values.

    A model calls it in the place of `jax.nn.dot_product_attention`; ours take it as `Config(attention=...)`.

    Args:
      mesh: the devices of the step, described ones too.
      kernel: "xla", "cudnn" (GPU), "splash" (TPU); None: the one for the mesh's devices where a call allows it, else
        XLA's. `Attention.kernel_for` says which.
      axis: as in `Parallelism`.
      axis_roles: as in `Parallelism`.

    Raises ValueError for a kernel that the mesh's devices do not have; its calls, for arrays that a given kernel cannot
    take.
    """
    axes = MeshAxes.of(mesh, axis, axis_roles)
    if kernel is not None and kernel not in KERNELS:
        raise UsageError(f"kernel={shown(kernel)}: give one of {', '.join(map(repr, KERNELS))}, or None.")
    combinations.check({"attention.kernel": kernel, "platform": "tpu" if axes.is_tpu else axes.platform})
    if kernel == "cudnn" and not cudnn_is_installed():
        raise UsageError("kernel='cudnn': cuDNN cannot be loaded: pip install 'zero-jax[cudnn]', or jax[cuda13] where "
                         "the GPUs are.")
    return Attention(axes, kernel)


@dataclasses.dataclass(frozen=True)
class Attention:
    """What `attention` returns. For simulated TPUs splash is interpreted; simulated GPUs have XLA's kernel."""

    axes: MeshAxes
    kernel: Kernel | None = None

    def of_slices(self) -> "Attention":
        """That of a model which `make_diloco_step` trains: each slice attends within its own batch."""
        return dataclasses.replace(self, axes=self.axes.of_slices())

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool = True,
                 segment_ids: SegmentIds | None = None, bias: jax.Array | None = None, scale: float | None = None
                 ) -> jax.Array:
        """The mixed values, (batch, queries, heads, head dim) in the dtype of `q`.

        q: (batch, queries, heads, head dim). k, v: (batch, keys, key-value heads, head dim); heads are a multiple of
        those. causal: query i attends to keys 0 to i. segment_ids: int (batch, queries) and (batch, keys): a query
        attends where both are equal. bias: added to the scores, broadcastable to (batch, heads, queries, keys). scale:
        of the scores; None: 1 / sqrt(head dim).

        Raises ValueError where the kernel that `attention` was given cannot compute this.
        """
        kernel, reason = self.kernel_for(q, k, bias=bias)
        if self.kernel not in (None, kernel) and not _initialising.get():
            raise UsageError(f"kernel={self.kernel!r}: {reason}: leave kernel out, or give \"xla\".")
        scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
        if kernel == "splash":
            interpret = self.axes.built_for.is_simulated
            return self._by_heads(functools.partial(_splash, causal=causal, scale=scale, interpret=interpret),
                                  q, k, v, segment_ids)
        if kernel == "cudnn" and self.axes.context_enabled:
            return self._by_heads(functools.partial(_cudnn, causal=causal, scale=scale), q, k, v, segment_ids)
        if kernel == "cudnn":
            return _cudnn(q, k, v, *(segment_ids or ()), causal=causal, scale=scale)
        # In float16 JAX's own attention requests a matrix product that only NVIDIA GPUs have.
        wide = jnp.float32 if q.dtype == jnp.float16 else q.dtype
        with jax.named_scope(CAUSAL_SCOPE if causal else "attention"):
            return jax.nn.dot_product_attention(
                *(each.astype(wide) for each in (q, k, v)), bias=bias, mask=_mask(*(segment_ids or ())),
                is_causal=causal, scale=scale, implementation="xla").astype(q.dtype)

    def kernel_for(self, q: Any, k: Any, *, bias: Any = None) -> tuple[Kernel, str]:
        """The kernel that computes a call with such arrays, and why not the one of these devices; "" if it does."""
        queries, head_dim, keys = q.shape[1], q.shape[3], k.shape[1]
        on_gpu, reason = self.axes.platform in GPU, ""
        if self.kernel == "xla" or bias is None and not on_gpu and not self.axes.is_tpu:
            return "xla", ""
        if bias is not None:
            reason = "a bias on the scores"
        elif on_gpu and not cudnn_is_installed():
            reason = "cuDNN cannot be loaded"
        elif on_gpu and q.dtype not in (jnp.bfloat16, jnp.float16):
            reason = f"{q.dtype} queries, where cuDNN takes bfloat16 and float16"
        elif on_gpu and head_dim > 128:
            reason = f"heads of {head_dim}, where cuDNN takes up to 128"
        elif on_gpu and (queries % 2 or keys % 2):
            reason = f"an odd length ({queries} queries, {keys} keys)"
        elif not on_gpu and not any(queries % block == keys % block == 0 for block in _BLOCKS):
            reason = f"{queries} queries and {keys} keys, of which splash takes multiples of {_BLOCKS[-1]}"
        elif not on_gpu or self.axes.context_enabled:
            reason = self._undivided(q, k)
        return ("xla", reason) if reason else ("cudnn" if on_gpu else "splash", "")

    @property
    def _head_axes(self) -> tuple[str, ...]:
        """The mesh axes that split heads within a kernel."""
        axes = self.axes
        return tuple(name for name, enabled in (
            (axes.tensor, axes.tensor_enabled), (axes.context, axes.context_enabled)) if enabled)

    def _undivided(self, q: Any, k: Any) -> str:
        """Why a kernel does not run on parts of these arrays; "" if it does."""
        axes, (batch, queries, heads, _), (keys, kv_heads) = self.axes, q.shape, k.shape[1:3]
        split, parts = axes.batch_shards, math.prod(map(axes.size, self._head_axes))
        if not (batch % split or heads % math.lcm(kv_heads, parts)):
            return ""
        scores = 4 * max(1, batch // split) * heads * queries * keys / parts
        return (f"{batch} examples with {heads} heads ({kv_heads} of keys), which {split} x {parts} devices do not "
                f"divide; XLA's attention writes the scores of a layer, {scores / 2**20:,.0f} MiB on each device")

    def _by_heads(self, local: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array,
                  segment_ids: SegmentIds | None) -> jax.Array:
        """`local(q, k, v, *segment_ids)` on each device, for whole sequences of its examples and heads."""
        def split(value: jax.Array) -> jax.Array:  # else the projections before and after are computed by heads, too
            if not self.axes.context_enabled:
                return value
            spec = P(self.axes.batch, self.axes.context, self._head_axes[:-1] or None, None)
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.axes.mesh, spec))

        kv_heads, parts = k.shape[2], math.prod(map(self.axes.size, self._head_axes))
        q, k, v = map(split, (q, k, v))
        k, v = (jnp.repeat(each, math.lcm(kv_heads, parts) // kv_heads, axis=2) for each in (k, v))
        arrays, rows = P(self.axes.batch, None, self._head_axes or None, None), P(self.axes.batch, None)
        specs = (arrays, arrays, arrays, *[rows] * (2 if segment_ids else 0))
        # check_vma: the kernel's results carry no mesh axes of their own, though every operand does.
        mapped: Callable[..., Any] = jax.shard_map(
            local, mesh=self.axes.mesh, in_specs=specs, out_specs=arrays, check_vma=False)
        return split(mapped(q, k, v, *(segment_ids or ())))


@functools.cache
def cudnn_is_installed() -> bool:
    """Whether cuDNN is loaded, which JAX does when it makes the devices of a GPU, live or described."""
    array = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:  # JAX asks for the library's version when it traces
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), array, array, array)
    except Exception:  # its own, of the plugin, and of the loader
        return False
    return True


def _mask(*ids: jax.Array) -> jax.Array | None:
    return ids[0][:, None, :, None] == ids[1][:, None, None, :] if ids else None


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array, causal: bool, scale: float) -> jax.Array:
    # cuDNN takes heads of multiples of 8: columns of zeros change no score, and give columns of zeros.
    padded = (jnp.pad(each.astype(q.dtype), [(0, 0)] * 3 + [(0, -q.shape[-1] % 8)]) for each in (q, k, v))
    return jax.nn.dot_product_attention(
        *padded, mask=_mask(*ids), is_causal=causal, scale=scale, implementation="cudnn")[..., :q.shape[-1]]


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array, causal: bool, scale: float, interpret: bool
            ) -> jax.Array:
    """On one device: as `Attention.__call__`. Heads that share their keys and values are queries of one kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    batch, queries, heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    block = next(size for size in _BLOCKS if queries % size == keys % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
             "block_q_dq", "block_kv_dq")
    shape = (queries, keys)
    mask: Any = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    kernel: Any = splash.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * (heads // kv_heads)), block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)),
        interpret=interpret)
    grouped = (q * scale).astype(q.dtype).reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    by_head = (jnp.moveaxis(grouped, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2))
    segments = splash.SegmentIds(*ids) if ids else None
    with jax.named_scope(CAUSAL_SCOPE if causal else "attention"):
        over_heads = jax.vmap(kernel, in_axes=(0, 0, 0, None))
        out: Any = jax.vmap(over_heads, in_axes=(0, 0, 0, 0 if ids else None))(*by_head, segments)
    return jnp.moveaxis(out, 3, 1).reshape(batch, queries, heads, head_dim).astype(q.dtype)
