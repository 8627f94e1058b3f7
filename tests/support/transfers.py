"""A chip, a timing and copies of a program whose times can be computed by hand."""

import dataclasses
import types

from zero_jax.contract.host import HostBudget, HostUse
from zero_jax.layout.layout import Placement
from zero_jax.xla.chip import built_in
from zero_jax.xla.host_reads import HostRead
from zero_jax.xla.host_slices import HostSlice
from zero_jax.xla.timing import Timing

TIMING = Timing(2.0, 1.5, 0.5, {"nvlink": 0.5}, {"compute": 1.5, "memory": 0.5, "nvlink": 0.0}, 100.0, 0.4, 0.5, 0.45)
CHIP = dataclasses.replace(built_in("h100"), host_link_bandwidth=10.0, host_memory_bandwidth=15.0)


def compiled(ahead, waited, update=0, written=0, checkpoints=0, engines=False):
    """A stand-in for a compiled step that reads so many bytes of parameters, and whose update moves the others.

    checkpoints: bytes that its loops write into stacks, and read again. engines: whether a GPU's copy engines copy.
    """
    rows = [Placement(name, (1,), (1,), "float32", None, size, 0, size, "", "host")
            for name, size in (("opt_state/mu", update), ("weights/kernel", written - update)) if size]
    layout = types.SimpleNamespace(host={"opt_state/mu"}, placements=lambda: rows)
    reads = [HostRead("a", "state.weights['kernel']", ahead // 2, 2, True, True, True),
             HostRead("b", "state.weights['embedding']", waited, 1, False, False, False),
             *[HostRead("c", "", checkpoints // 2, 2, True, True, True)] * bool(checkpoints)]
    budget = HostBudget(update, param_bytes=ahead + waited, activations=bool(checkpoints))
    slices = (HostSlice("slice", "", "", False, (0, 8), (0, 8) if engines else None),)
    return types.SimpleNamespace(layout=layout, host_slices=slices, host_use=HostUse(0, 0, 0, (), tuple(reads)),
                                 contract=types.SimpleNamespace(host=budget))
