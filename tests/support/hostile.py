"""What a fuzzer makes of values and of files: hypothesis strategies, each derandomized where they are used."""

import datetime
import functools
import os
import traceback

import hypothesis
import jax
import numpy as np
from hypothesis import strategies as st

from zero_jax.errors import MAX_MESSAGE, UsageError

SETTINGS = functools.partial(
    hypothesis.settings, derandomize=True, deadline=None, database=None,
    suppress_health_check=[*hypothesis.HealthCheck], phases=[hypothesis.Phase.generate])
"""The same examples in every run, and the first failure as it is: shrinking would take minutes."""

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.sampled_from([2**31, 2**63, -2**70]),
    st.floats(), st.text(max_size=6),
    st.sampled_from(["data", "tensor", "bf16", "fp32", "full", "dots", "once", "cpu", "["]),
    st.binary(max_size=3), st.tuples(st.text(max_size=3)), st.lists(st.integers(-1, 9), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2), st.complex_numbers(),
    st.sampled_from([object(), int, len, np.float32(2), np.int64(4), np.zeros(3), np.array(["a"]),
                     datetime.date(2000, 1, 1), jax.ShapeDtypeStruct((16, 8), np.float32), os]))


def clear(call):
    """Whether `call()` returned; a UsageError that is short and printable is the other right answer."""
    try:
        call()
    except UsageError as error:
        message = str(error)
        assert 20 < len(message) <= MAX_MESSAGE and message.replace("\n", "").isprintable(), message
        return False
    except Exception as error:
        raise AssertionError("a raw error: " + "".join(traceback.format_exception(error)[-6:])) from None
    return True


@st.composite
def mutated(draw, text: bytes):
    """`text` with up to four changes: bytes flipped, cut, doubled, put in, or a number in it replaced."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(text) - 1)))
        length = draw(st.sampled_from([1, 1, 2, 8, 64]))
        kind = draw(st.sampled_from(["flip", "cut", "end", "double", "put"]))
        if kind == "flip":
            text = text[:at] + bytes([text[at] ^ (1 << draw(st.integers(0, 7)))] if text else b"") + text[at + 1:]
        elif kind == "cut":
            text = text[:at] + text[at + length:]
        elif kind == "end":
            text = text[:at]
        elif kind == "double":
            text = text[:at] + text[at:at + length] * 2 + text[at + length:]
        else:
            text = text[:at] + draw(st.sampled_from([
                b"[", b"]", b"{", b"}", b'"', b"0", b"-1", b"9" * 30, b"null", b"1e999", b"\x00", b"\xff", b"\\", b",",
                b"..", b"/", b"true", b"NaN"])) + text[at:]
    return text
