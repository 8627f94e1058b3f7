"""What block-quantised messages leave of an array: a quantiser in NumPy that uses nothing of the library."""

import ml_dtypes
import numpy as np

LIMITS = {"int8": 127, "fp8": 448, "int4": 7, "fp4": 1}


def rounded(values, name, block):
    """What a receiver has of a flat float32 array that was sent in blocks: in NumPy, and nothing of the library."""
    number = -(-values.size // block)
    size = -(-values.size // number)
    size += size % 2
    blocks = np.zeros(number * size, np.float32)
    blocks[:values.size] = values
    blocks = blocks.reshape(number, size)
    scales = (np.abs(blocks).max(1) * np.float32(1 / LIMITS[name])).astype(np.float32)
    short = scales.astype(ml_dtypes.bfloat16)
    short = np.where(short.astype(np.float32) < scales, np.nextafter(short, ml_dtypes.bfloat16(np.inf)), short)
    scales = np.where(scales < 2.0**-126, 0, short.astype(np.float32))[:, None]
    codes = np.clip(blocks / np.where(scales == 0, 1, scales), -LIMITS[name], LIMITS[name])
    if name == "fp4":  # the nearest power of two, of at least 2**-6; 0 below half of that
        fraction, exponent = np.frexp(np.abs(codes))
        nearest = np.maximum(np.ldexp(1.0, exponent - (fraction <= 0.75)), 2.0**-6)
        codes = np.copysign(np.where(np.abs(codes) <= 2.0**-7, 0, nearest), codes)
    else:
        codes = codes.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) if name == "fp8" else np.rint(codes)
    return (codes * scales).reshape(-1)[:values.size].astype(np.float32)
