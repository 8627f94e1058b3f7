"""On CPUs a loop that sends waits for what is sent before it, and what is sent behind it for the loop."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import zero_jax
from zero_jax.views.in_parts import one_by_one


def apart(early, looped, late):
    """Collectives before, in and behind a loop; none of them needs another."""
    def body(carry, row):
        return carry + jax.lax.psum(row, "data"), jax.lax.psum(row * carry, "data")

    early = jax.lax.pmax(early, "data")
    return early, jax.lax.scan(body, jnp.zeros_like(looped[0]), looped), jax.lax.pmin(late, "data")


def behind(text, start):
    """The kinds of instructions that the entry's instruction of this kind and scope waits for."""
    lines = re.findall(r"^  (?:ROOT )?%(\S+) = \S.*? ([\w-]+)\((.*)$", text[text.index("ENTRY "):], re.M)
    kinds = {name: kind for name, kind, _ in lines}
    operands = {name: re.findall(r"%([\w.-]+)", rest.split("), ")[0]) for name, _, rest in lines}
    todo, found = [name for name, kind, rest in lines if re.search(start, f"{kind} {rest}")], set()
    assert todo
    while todo:
        new = {*operands.get(todo.pop(), ())} - found
        found |= new
        todo += new
    return {kinds[name] for name in found}


@pytest.mark.parametrize("ordered", [True, False])
def test_a_loop_that_sends_is_between_what_is_sent(ordered):
    mapped = jax.shard_map(apart, mesh=zero_jax.make_mesh(), in_specs=(P(),) * 3, out_specs=P(), check_vma=False)
    args = jnp.arange(64.0), jnp.ones((5, 64)), -jnp.arange(64.0)
    closed = jax.make_jaxpr(mapped)(*args)
    program = jax.jit(jax.extend.core.jaxpr_as_fun(one_by_one(closed) if ordered else closed)).lower(*args).compile()
    text = program.as_text()
    waits = "while" in behind(text, "^all-reduce .*pmin"), "all-reduce" in behind(text, "^while ")
    assert waits == (ordered, ordered)
    if ordered:
        early, total, *_ = program(*args)
        assert (early == args[0]).all() and (total == 40).all()
