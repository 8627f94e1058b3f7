"""The loss of packed documents is that of each document by itself, where the model heeds segments and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zero_jax.cli.training.evaluation import token_sums
from zero_jax.data.documents import Documents
from zero_jax.data.objectives import causal
from zero_jax.data.packing import DocumentRows
from zero_jax.step.losses import next_token_loss

VOCAB, WIDTH, LENGTH = 50, 8, 24
LENGTHS = np.array([5, 17, 9, 5, 9, 3])  # few different ones: each is compiled


def attend(tokens, segment_ids=None, positions=None, *, heeds=True):
    """One layer of causal attention without parameters but a random table, (batch, length) to logits."""
    table = jax.random.normal(jax.random.key(0), (VOCAB, WIDTH))
    places = jax.random.normal(jax.random.key(1), (LENGTH, WIDTH))
    length = tokens.shape[1]
    positions = jnp.arange(length)[None] if positions is None or not heeds else positions
    x = table[tokens] + places[positions]
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    if segment_ids is not None and heeds:
        mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = jnp.where(mask, jnp.einsum("bqd,bkd->bqk", x, x), -jnp.inf)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x) @ table.T


def losses(pack):
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    tokens = np.random.default_rng(1).integers(1, VOCAB, offsets[-1])
    rows = DocumentRows(Documents(tokens, offsets), LENGTH, pack=pack, causal=True)
    batch = [causal(rows.row(number)) for number in range(rows.num_examples)]
    return {name: jnp.stack([row[name] for row in batch]) for name in batch[0]}


@pytest.mark.slow
def test_packed_is_one_document_after_another():
    tokens = np.random.default_rng(1).integers(1, VOCAB, LENGTHS.sum())
    total, number = 0.0, 0
    for document in np.split(tokens, np.cumsum(LENGTHS)[:-1]):
        alone = {"inputs": jnp.asarray(document[None, :-1]), "targets": jnp.asarray(document[None, 1:])}
        total += float(next_token_loss(attend, alone)) * (len(document) - 1)
        number += len(document) - 1
    packed, padded = losses(True), losses(False)
    assert packed["inputs"].shape[0] < padded["inputs"].shape[0]
    for batch in (packed, padded):
        mean, _, weight = next_token_loss(attend, batch)
        np.testing.assert_allclose(mean, total / number, rtol=1e-5)
        assert weight == number
        sums = token_sums(attend, batch)
        np.testing.assert_allclose([sums["loss"], sums["weight"]], [total, number], rtol=1e-5)
    # The control: a model that takes the arguments and does not heed them.
    crossing, _, _ = next_token_loss(lambda *args, **given: attend(*args, **given, heeds=False), packed)
    assert abs(float(crossing) - total / number) > 1e-3 * total / number


def test_a_model_without_the_arguments_is_refused():
    with pytest.raises(ValueError, match="does not take segment_ids and positions: its attention would cross"):
        next_token_loss(lambda tokens: attend(tokens), losses(True))
