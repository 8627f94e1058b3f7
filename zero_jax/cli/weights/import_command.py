"""The command `import`: weights of a published checkpoint as a file in our names."""

from pathlib import Path

import jax
import jax.numpy as jnp

from zero_jax.cli.environment import simulates
from zero_jax.cli.weights.export_command import DTYPES
from zero_jax.cli.weights.file_configs import ImportConfig
from zero_jax.interop.params_io import convert_tensors, model_leaves
from zero_jax.sharding.mesh import make_mesh
from zero_jax.step.make import make_zero_train_step


def import_command(config: ImportConfig) -> list[Path]:
    """Writes the files and returns their paths.

    Raises ValueError for weights that are not of this model, and files that cannot be written.
    """
    choice = config.check()
    names = choice.tensor_names()
    assert names is not None
    if simulates():
        jax.config.update("jax_platforms", "cpu")  # one device is enough: it only says which parameters there are
    step = make_zero_train_step(choice.build(choice.config), 0, loss=choice.loss,
                                mesh=make_mesh(devices=jax.devices()[:1]))
    if choice.batch_shapes is not None:
        batch = choice.batch_shapes(choice.config, 1, None)
    else:
        batch = {name: jax.ShapeDtypeStruct((1, 8), jnp.int32) for name in ("inputs", "targets")}
    return convert_tensors(config.weights, config.out, dict(model_leaves(step.layout(batch).state)),
                           names=names, dtype=DTYPES[config.dtype],
                           max_file_bytes=config.max_file_bytes)
