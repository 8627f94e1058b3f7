"""GPT-2 in NumPy: Hugging Face's tensors, and a forward pass in float64 written from the paper."""

import numpy as np


def hugging_face(config, seed=0, prefix="transformer."):
    """Random tensors with the names and shapes of Hugging Face's GPT2LMHeadModel, written from its source."""
    draw, width = np.random.default_rng(seed).normal, config.width
    shapes = {"wte.weight": (config.vocab_size, width), "wpe.weight": (config.max_length, width),
              "ln_f.weight": (width,), "ln_f.bias": (width,)}
    for i in range(config.num_layers):
        shapes |= {f"h.{i}.{name}": shape for name, shape in {
            "ln_1.weight": (width,), "ln_1.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width), "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width), "mlp.c_proj.bias": (width,)}.items()}
    return {prefix + name: draw(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def numpy_gpt2(tensors, tokens, *, num_heads, prefix="transformer.", fused="q k v"):
    """Logits in float64, from the paper's equations and the layout of Hugging Face's Conv1D (inputs x outputs)."""
    t = {name.removeprefix(prefix): value.astype(np.float64) for name, value in tensors.items()}

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x, name):
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    seq = tokens.shape[1]
    x = t["wte.weight"][tokens] + t["wpe.weight"][:seq]
    for i in range(sum(name.endswith("ln_1.bias") for name in t)):
        columns = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, axis=-1)
        q, k, v = (columns["qkv".index(part)].reshape(*x.shape[:2], num_heads, -1) for part in fused.split())
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + linear(np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), f"h.{i}.attn.c_proj")
        hidden = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ t["wte.weight"].T
