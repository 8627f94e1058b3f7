"""The models of third_party.py: what others wrote, small, each with a loss and a batch."""

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from typing import Any

ROWS, LENGTH = 16, 32
VOCABULARY, WIDTH, HEADS, CLASSES, PIXELS = 1024, 256, 4, 128, 32

BERT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "intermediate_size": 2 * WIDTH, "max_position_embeddings": 64}
VIT = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH,
       "image_size": PIXELS, "patch_size": 8, "num_labels": CLASSES}
LLAMA = {**BERT, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS,
         "max_position_embeddings": 128}  # transformers cuts its table of angles at this many columns
BART = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH, "max_position_embeddings": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 2 * WIDTH, "num_layers": 2,
      "num_heads": HEADS}
RESNET = {"embedding_size": 64, "hidden_sizes": [128, 256], "depths": [1, 1], "num_labels": CLASSES}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model. make: returns (model, loss, batch); the model has its values, or is a Linen module or NNX factory."""

    package: str
    make: Callable[[], tuple[Any, Any, Any]]
    note: str = ""


def arrays(length=LENGTH):
    """Whatever a model may be called with, by the names that arguments have in transformers."""
    import numpy as np

    rng = np.random.default_rng(0)
    mask = (np.arange(length) < rng.integers(length // 2, length + 1, (ROWS, 1))).astype(np.int32)
    tokens = {"input_ids": rng.integers(4, VOCABULARY, (ROWS, length)).astype(np.int32), "attention_mask": mask,
              "position_ids": np.tile(np.arange(length, dtype=np.int32), (ROWS, 1)),
              "token_type_ids": np.zeros((ROWS, length), np.int32)}
    return {**tokens, **{f"decoder_{name}": leaf for name, leaf in tokens.items()},
            "pixel_values": rng.normal(size=(ROWS, PIXELS, PIXELS, 3)).astype(np.float32),
            "input_features": rng.normal(size=(ROWS, 16, 2 * length)).astype(np.float32),
            "input_values": rng.normal(size=(ROWS, 1600)).astype(np.float32)}


def cross_entropy(logits, targets):
    """The mean over all positions; a target for each example, or for each position."""
    import jax.numpy as jnp
    import optax

    targets = targets.reshape(targets.shape + (1,) * (logits.ndim - 1 - targets.ndim))
    targets = jnp.broadcast_to(targets, logits.shape[:-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def transformers(name: str, config: dict[str, Any], targets: str = "input_ids", **options: Any) -> Case:
    """A Flax model of transformers with the parameters that it makes itself.

    targets: which of `arrays` it predicts; "classes": a class for each example; "pairs": which text has which image.
    options: of its call.
    """
    def make():
        import jax.numpy as jnp
        import numpy as np

        if "T5" in name:
            with_old_clip()
        cls = getattr(importlib.import_module("transformers"), f"Flax{name}")
        model = cls(cls.config_class(**config), seed=0)  # called as deterministic, so that nothing is dropped
        accepted, known = inspect.signature(type(model.module).__call__).parameters, arrays()
        names = [name for name in accepted if name in known and name not in options]
        nothing = {"head_mask": None} if "head_mask" in accepted else {}
        batch = {name: known[name] for name in names}
        if targets == "classes":
            batch["targets"] = np.random.default_rng(1).integers(0, CLASSES, ROWS)
        elif targets != "pairs":
            batch["targets"] = known[targets]

        def loss(module, batch):
            out = module(**{name: batch[name] for name in names}, **nothing, **options, return_dict=True)
            if targets == "pairs":
                return cross_entropy(out.logits_per_text, jnp.arange(ROWS))
            return cross_entropy(out.logits, batch["targets"])

        return model, loss, batch

    return Case("transformers", make, "jnp.clip(a_max=), which JAX has removed, put back" if "T5" in name else "")


def with_old_clip():
    """Puts an argument name back that `jnp.clip` had when the last Flax models of transformers were written."""
    import jax.numpy as jnp

    now: Any = jnp.clip
    jnp.clip = lambda array, *bounds, a_max=None, **named: now(array, *bounds, **(
        named if a_max is None else {**named, "max": a_max}))


def tunix(family: str, cls: str, **config: Any) -> Case:
    """A decoder of tunix, an NNX module, whose parameters have partitioning metadata for the axes fsdp and tp."""
    def make():
        import jax.numpy as jnp
        from flax import nnx

        module = importlib.import_module(f"tunix.models.{family}.model")
        known = {"num_layers": 2, "vocab_size": VOCABULARY, "embed_dim": WIDTH, "hidden_dim": 2 * WIDTH,
                 "num_heads": HEADS, "head_dim": WIDTH // HEADS, "num_kv_heads": 2, "rope_theta": 10000,
                 "norm_eps": 1e-6, **config}
        model = getattr(module, cls)(module.ModelConfig(**known), rngs=nnx.Rngs(0))

        def loss(model, batch):
            causal = jnp.tril(jnp.ones((1, LENGTH, LENGTH), bool)) & (batch["attention_mask"][:, None] > 0)
            logits, _ = model(batch["input_ids"], batch["position_ids"], None, causal)
            return cross_entropy(logits, batch["targets"])

        batch = {name: arrays()[name] for name in ("input_ids", "attention_mask", "position_ids")}
        return model, loss, {**batch, "targets": batch["input_ids"]}

    return Case("google-tunix", make)


CASES = {
    "gpt2": transformers("GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64}),
    "gptj": transformers("GPTJForCausalLM", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "rotary_dim": 32}),
    "gpt-neo": transformers("GPTNeoForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": 2, "num_heads": HEADS,
        "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 16}),
    "bert": transformers("BertForMaskedLM", BERT),
    "roberta": transformers("RobertaForMaskedLM", {**BERT, "max_position_embeddings": 72}),
    "albert": transformers("AlbertForMaskedLM", {**BERT, "embedding_size": 128}),
    "electra": transformers("ElectraForMaskedLM", {**BERT, "embedding_size": WIDTH}),
    "distilbert": transformers("DistilBertForMaskedLM", {
        "vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": HEADS, "hidden_dim": 2 * WIDTH,
        "max_position_embeddings": 64}),
    "roformer": transformers("RoFormerForMaskedLM", BERT),
    "big-bird": transformers("BigBirdForMaskedLM", {**BERT, "attention_type": "original_full"}),
    "t5": transformers("T5ForConditionalGeneration", T5, "decoder_input_ids"),
    "long-t5": transformers("LongT5ForConditionalGeneration", {**T5, "local_radius": 7}, "decoder_input_ids"),
    "bart": transformers("BartForConditionalGeneration", BART, "decoder_input_ids"),
    "pegasus": transformers("PegasusForConditionalGeneration", BART, "decoder_input_ids"),
    "opt": transformers("OPTForCausalLM", {**BERT, "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH}),
    "bloom": transformers("BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS}),
    "xglm": transformers("XGLMForCausalLM", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "num_layers": 2, "attention_heads": HEADS, "ffn_dim": 2 * WIDTH,
        "max_position_embeddings": 64}),
    "llama": transformers("LlamaForCausalLM", LLAMA),
    "mistral": transformers("MistralForCausalLM", LLAMA),
    "gemma": transformers("GemmaForCausalLM", LLAMA),
    "whisper": transformers("WhisperForConditionalGeneration", {
        **BART, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, "decoder_input_ids"),
    "wav2vec2": transformers("Wav2Vec2ForCTC", {
        **BERT, "vocab_size": CLASSES, "conv_dim": [128, 128], "conv_stride": [10, 8], "conv_kernel": [10, 8],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
        "do_stable_layer_norm": True, "feat_extract_norm": "layer"}, "classes"),
    "vit": transformers("ViTForImageClassification", VIT, "classes"),
    "beit": transformers("BeitForImageClassification", VIT, "classes"),
    "dinov2": transformers("Dinov2ForImageClassification", {**VIT, "mlp_ratio": 2}, "classes"),
    "clip": transformers("CLIPModel", {
        "text_config": BERT, "vision_config": VIT, "projection_dim": WIDTH}, "pairs"),
    "resnet": transformers("ResNetForImageClassification", RESNET, "classes", deterministic=False),
    "regnet": transformers("RegNetForImageClassification", {
        **RESNET, "groups_width": 64}, "classes", deterministic=False),
    "tunix-llama3": tunix("llama3", "Llama3"),
    "tunix-qwen2": tunix("qwen2", "Qwen2"),
    "tunix-qwen3": tunix("qwen3", "Qwen3"),
}
