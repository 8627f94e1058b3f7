"""Where a round of a backward loop may gather for the next one on v5e: what XLA sends within products, as a table.

    python scripts/tables/carried_gather.py              # a minute; no accelerator

No step of the library: a loop over 8 layers of 4 products (1024 x 1024, 2048 tokens on each device), each of which
gathers its weights, computes again, and reduces its gradients, with the options of `overlap=True`. Ways: "in its
round": a layer's first weight is gathered in the round that uses it. "carried": the round before gathers it, and the
loop carries it; then XLA may send it from the beginning of that round to its end, and nothing else meanwhile. "carried,
placed": optimization barriers let it begin behind the third product of the round, and end with the fourth, beside which
nothing else is gathered. "carried, placed late": beside the last product, which the last reduction needs.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as barrier
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax import make_mesh
from zero_jax.sharding.mesh_axes import MeshAxes
from zero_jax.sharding.reduce_scatter import reduce_parts
from zero_jax.xla.devices import compiled_for, target_devices
from zero_jax.xla.events import collectives
from zero_jax.xla.overlap import overlap_options
from zero_jax.xla.schedule import schedule

TARGET, WIDTH, LAYERS, TOKENS = "v5e:2x4", 1024, 8, 2048
WAYS = ("in its round", "carried", "carried, placed", "carried, placed late")


def backward(way: str, axes: MeshAxes) -> Callable[..., tuple[jax.Array, list[jax.Array]]]:
    """The loop, on one device: (gradient of the last output, inputs of the layers, shards of their weights)."""
    split = P(tuple(axes.mesh.axis_names))

    def gather(weight: jax.Array) -> jax.Array:
        return jax.lax.all_gather(weight, axes.mesh.axis_names, tiled=True)

    def one_round(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array, jax.Array]):
        (gradient, first), (x, shards, ahead) = carry, xs
        weights = [gather(shards[0]) if way == "in its round" else first]
        inputs, products, after = [x], list[jax.Array](), first
        for layer in range(4):  # computed again
            if layer == 3 and way == "carried, placed":
                inputs[3], ahead = barrier((inputs[3], ahead))
                after = gather(ahead)
            products.append(inputs[layer] @ weights[layer])
            if layer == 3 and way == "carried, placed":
                products[3], after = barrier((products[3], after))
            if layer < 3:
                inputs.append(jax.nn.gelu(products[layer]))
                weights.append(gather(shards[layer + 1]))
        reduced = []
        for layer in reversed(range(4)):
            gradient = jax.vjp(jax.nn.gelu, products[layer])[1](gradient)[0]
            reduced.append(reduce_parts(inputs[layer].T @ gradient, axes, split))
            if layer == 0 and way == "carried, placed late":
                gradient, ahead = barrier((gradient, ahead))
            gradient = gradient @ weights[layer].T
        if way in ("carried", "carried, placed late"):
            after = gather(ahead)
        return (gradient, after), reduced

    def loop(gradient: jax.Array, inputs: jax.Array, shards: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        ahead = jnp.concatenate([shards[-1:, 0], shards[:-1, 0]])  # of the layer before; the last gather is not used
        first = gather(shards[-1, 0]) if way != "in its round" else jnp.zeros((), gradient.dtype)
        (gradient, _), reduced = jax.lax.scan(one_round, (gradient, first), (inputs, shards, ahead), reverse=True)
        return gradient, reduced

    return loop


def measure(way: str) -> str:
    """A row of the table."""
    mesh = make_mesh(devices=target_devices(TARGET))
    split, stacked = P(mesh.axis_names), P(None, mesh.axis_names)
    loop = jax.shard_map(backward(way, MeshAxes.of(mesh)), mesh=mesh, in_specs=(split, stacked, P(None, *stacked)),
                         out_specs=(split, stacked), check_vma=False)
    rows, device = mesh.size * TOKENS, mesh.devices.flat[0]
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in (
        ((rows, WIDTH), split), ((LAYERS, rows, WIDTH), stacked), ((LAYERS, 4, WIDTH, WIDTH), P(None, *stacked)))]
    compiled = compiled_for(jax.jit(loop).lower(*like), device, overlap_options(device, True))
    found = [each for each in collectives(schedule(compiled.as_text())) if each.in_loop]
    of_kinds = [[each.overlapped_flops > 0 for each in found if each.kind == kind]
                for kind in ("all-gather", "reduce-scatter")]
    return f"| {way} | {' | '.join(f'{sum(each)} of {len(each)}' for each in of_kinds)} |"


if __name__ == "__main__":
    print("| a layer's first weight is gathered | gathers within products | reductions |\n| --- | --- | --- |")
    for name in sys.argv[1:] or WAYS:
        print(measure(name), flush=True)
