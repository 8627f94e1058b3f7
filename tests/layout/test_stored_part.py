"""Each device's part of a padded or merged leaf, from just the elements that it needs."""

import itertools

import numpy as np
import pytest

from zero_jax.sharding.shard_reader import stored_part
from zero_jax.sharding.stored_shape import StoredShape, identity_shape

VIEWS = {
    "as it is": identity_shape((6, 5, 4)), "scalar": identity_shape(()), "empty": identity_shape((0, 7)),
    "padded": StoredShape(((7,), (5,), (3,)), (8, 6, 3)), "merged": StoredShape(((7,), (5, 3)), (7, 15)),
    "merged and padded": StoredShape(((3, 5, 7),), (112,)), "two merged": StoredShape(((2, 3), (5, 3)), (8, 16)),
    "much padding": StoredShape(((2,),), (8,)), "a group of none": StoredShape(((), (3,)), (1, 4))}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_a_part_is_that_of_the_stored_leaf(name, parts):
    view = VIEWS[name]
    value = np.arange(1, 1 + np.prod(view.shape), dtype=np.float32).reshape(view.shape)
    whole = np.asarray(view.store(value))
    assert whole.shape == view.stored
    read = np.zeros(view.shape, int)

    def read_part(index):
        read[index] += 1
        return value[index]

    cuts = [[*itertools.pairwise(np.linspace(0, size, parts + 1).astype(int).tolist())] for size in view.stored]
    for spans in itertools.product(*cuts):
        found = stored_part(view, spans, np.float32, read_part)
        np.testing.assert_array_equal(found, whole[tuple(slice(*span) for span in spans)])
    assert (read == 1).all(), "every element is read by the one part that holds it, and by no other"
