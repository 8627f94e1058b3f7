"""EleutherAI's lm-evaluation-harness over an exported folder, on the CPU and without network, beside `evaluate`.

    python -m venv harness && harness/bin/pip install "lm_eval[hf]"
    PYTHONPATH=. python scripts/reliability/lm_eval_harness.py --harness harness/bin/lm_eval    # 3 minutes

Trains a tiny LLaMA with a tokenizer of its own, exports it, and has the harness compute the tasks of
docs/recipes/lm_eval: `held_out`, the bits per byte of texts, and `choices`, an accuracy. `zero-jax evaluate` of the
same texts, each after the end of text, with which the harness begins, must have the same nats to 1e-5 of them. The
control: a checkpoint of half of the steps has others.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "docs" / "recipes" / "lm_eval"
SHAPE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
         "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
         "hidden_act": "silu"}
TEXTS = [f"def {name}({args}):\n    return {args.split(', ')[0]}\n" for name in ("first", "begin", "head", "start")
         for args in ("a, b", "x, y, z", "self, other")]


def zero_jax(folder, *args):
    """What a command prints; ends this script where it fails."""
    done = subprocess.run([sys.executable, "-m", "zero_jax", *map(str, args)], cwd=folder, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode:
        sys.exit(f"zero-jax {' '.join(map(str, args))}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def harness(program, folder, model):
    """The harness's results by task, of an exported folder."""
    out = folder / f"results_{model}"
    command = [program, "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks",
               "held_out,choices", "--include_path", ".", "--device", "cpu", "--batch_size", "4", "--output_path",
               out.name]
    print("$ lm_eval", *command[1:], flush=True)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={
        **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")})
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    print(done.stdout[done.stdout.find("|"):])
    (file,) = out.rglob("results_*.json")
    return json.loads(file.read_text())["results"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harness", type=lambda path: Path(path).absolute(), default=shutil.which("lm_eval"))
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if args.harness is None:
        parser.error("there is no lm_eval on the path: name it with --harness")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in RECIPE.iterdir():
            shutil.copy(file, folder)
        (folder / "shape").mkdir()
        (folder / "shape" / "config.json").write_text(json.dumps(SHAPE))
        zero_jax(folder, "tokenize", "--out", "tokens", "--vocab-size", 512, "--max-bytes", 400_000)
        zero_jax(folder, "train", "--model", "shape", "--data", "tokens", "--steps", args.steps, "--seq-len", 64,
                 "--save-every", args.steps // 2, "--samples", 0, "--out", "run")
        for model, at in (("model", args.steps), ("half", args.steps // 2)):
            zero_jax(folder, "export", "--checkpoint", "run", "--at", at, "--names", "huggingface", "--out", model)
        (folder / "held_out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        (folder / "after_end.jsonl").write_text("".join(
            json.dumps({"text": "<|endoftext|>" + text}) + "\n" for text in TEXTS))
        found = {model: harness(args.harness, folder, model) for model in ("model", "half")}
        ours = json.loads(zero_jax(folder, "evaluate", "run", "--text", "after_end.jsonl", "--json"))
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    nats, half = (found[model]["held_out"]["bits_per_byte,none"] * math.log(2) * num_bytes for model in found)
    print(f"nats of {len(TEXTS)} texts: lm_eval {nats:.5f}, zero-jax evaluate {ours['nats']:.5f}; after half of the "
          f"steps lm_eval {half:.5f}")
    if abs(nats - ours["nats"]) > 1e-5 * ours["nats"] or abs(half - ours["nats"]) < 1e-2 * ours["nats"]:
        sys.exit("They differ, or the control does not.")


if __name__ == "__main__":
    main()
