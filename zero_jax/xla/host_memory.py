"""Host memory in programs for GPUs of a target topology, whose devices list no memories.

jaxlib drops every memory kind for such devices without a word (0.10.2 to 0.12). XLA's compiler for them takes the kinds
as any other GPU's does, so they are written on the lowered program's arguments and results: `mhlo.memory_kind`, which
JAX writes there for attached devices and for TPUs. The only module that edits MLIR.
"""

from collections.abc import Sequence

import jax
from jaxlib.mlir import ir

_KIND = "mhlo.memory_kind"


def lists_memories(device: jax.Device) -> bool:
    """Whether JAX knows the memories of `device`, so that it writes memory kinds itself."""
    return bool(device.addressable_memories())


def set_memory_kinds(lowered: jax.stages.Lowered, arguments: Sequence[str | None], results: Sequence[str | None]
                     ) -> jax.stages.Lowered:
    """`lowered`, with these memory kinds on its first arguments and results; None, and what is further: device memory.

    It must have been made with `keep_unused=True`, so that its arguments are those of the function.
    """
    module = lowered.compiler_ir("stablehlo")
    main = next(op for op in module.body.operations  # type: ignore[union-attr]
                if "sym_name" in op.attributes and ir.StringAttr(op.attributes["sym_name"]).value == "main")
    with module.context:  # type: ignore[union-attr]
        for name, kinds in (("arg_attrs", arguments), ("res_attrs", results)):
            attributes = [{each.name: each.attr for each in ir.DictAttr(given)} for given in main.attributes[name]]
            for given, kind in zip(attributes, kinds, strict=False):
                if kind is not None:
                    given[_KIND] = ir.StringAttr.get(kind)
            main.attributes[name] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in attributes])
    return lowered
