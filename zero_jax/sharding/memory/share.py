"""A share of what an optimizer keeps, which is in host memory, the rest being on the device (`Offload.fraction`)."""

from collections.abc import Mapping

from zero_jax.sharding.layout import Layout
from zero_jax.tree import named_leaves


def shared(sizes: Mapping[str, int], layout: Layout, fraction: float) -> frozenset[str]:
    """`share_of` the leaves of so many bytes, all that belong to a parameter together.

    A block of an update with a moment on the host and one on the device has copies of the latter: 64.6 MiB of
    temporaries where all on either side have 41 and 28 (four matrices of 4096 x 2048 and less, two H100).
    """
    params = [name for name, _ in named_leaves(layout.state.params)]
    owner = {name: max((param for param in params if name.endswith(f"/{param}")), key=len, default=name)
             for name in sizes}
    groups = dict[str, int]()
    for name, size in sizes.items():
        groups[owner[name]] = groups.get(owner[name], 0) + size
    share = share_of(groups, fraction)
    return frozenset(name for name in sizes if owner[name] in share)


def share_of(sizes: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Names that are at least that fraction of all bytes: the largest that fit into it, and one more.

    sizes: bytes of each. A pure function, so that each process and each restart takes the same.
    """
    wanted, share = fraction * sum(sizes.values()), dict[str, int]()
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    for name in by_size:
        if sum(share.values()) + sizes[name] <= wanted:
            share[name] = sizes[name]
    if (rest := wanted - sum(share.values())) > 0:
        completing = next(name for name in reversed(by_size) if name not in share and sizes[name] >= rest)
        for name in list(share):  # what is not needed beside it
            if sum(share.values()) - sizes[name] + sizes[completing] >= wanted:
                del share[name]
        share[completing] = sizes[completing]
    return frozenset(share)
