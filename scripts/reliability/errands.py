"""Five errands of a newcomer, each of at most three commands and no Python, timed; nothing is downloaded.

    PYTHONPATH=. python scripts/reliability/errands.py [NAME ...] [--transformers PYTHON]    # 5 minutes on two cores

What an errand needs (a model folder, pictures, a chat) is made first, of random weights and of Python's own library.
--transformers: an interpreter with transformers and torch, which then loads the exported folders.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SIZES = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 3,
         "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0}
GEMMA = SIZES | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16,
                 "sliding_window": 32, "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
                 "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "rope_theta": 1e6,
                 "rope_local_base_freq": 1e4}
COLOURS = {"daisy": (240, 240, 230), "rose": (200, 20, 40), "violet": (120, 40, 200)}
QUESTION, ANSWER = "Which colour is the sky?", "Blue, most of the day."


def zero_jax(folder, command):
    """What a command prints; ends this script where it fails."""
    done = subprocess.run([sys.executable, "-m", "zero_jax", *shlex.split(command)], cwd=folder, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"})
    if done.returncode:
        sys.exit(f"zero-jax {command}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def model_folder(folder, config):
    """`base`: a model of that configuration with its tokenizer, as transformers has it."""
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    zero_jax(folder, "tokenize --out tokens --vocab-size 512 --max-bytes 200000")
    zero_jax(folder, "train --model shape --data tokens --steps 5 --seq-len 64 --samples 0 --out first")
    zero_jax(folder, "export --checkpoint first --names huggingface --out base")


def chat(folder):
    """`base`, and `chat.jsonl`."""
    model_folder(folder, LLAMA)
    rows = [{"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}
            for asked, answered in ((QUESTION, ANSWER), ("Who are you?", "A small model."))] * 64
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def pictures(folder):
    """`flowers`: a folder of JPEGs for each of three classes."""
    from PIL import Image

    noise = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / "flowers" / name).mkdir(parents=True)
        for number in range(40):
            pixels = np.clip(np.array(colour) + noise.normal(0, 30, (24, 32, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "flowers" / name / f"{number}.jpg")


def tensors(path):
    """Name -> shape of what a safetensors file has."""
    content = path.read_bytes()
    header = json.loads(content[8:8 + int.from_bytes(content[:8], "little")])
    return {name: each["shape"] for name, each in header.items() if name != "__metadata__"}


def answers(folder, printed):
    """The response alone, which ends."""
    assert printed[-1].strip().endswith(ANSWER), printed[-1]


def classes_are_found(folder, printed):
    """Held-out pictures are told apart."""
    assert float(re.findall(r"accuracy ([0-9.]+) %", printed[0])[-1]) > 90, printed[0][-1500:]


def went_on(folder, printed):
    """Each command goes on where the one before ended."""
    assert [*map(bool, (re.search(r"\b(20|40)\b.*resum|resum.*\b(20|40)\b", text, re.I) for text in printed))] == [
        False, True, True], printed[1][:1500]


def dry(folder, printed):
    """The step that was planned."""
    assert "Dry run" in printed[1] and "Fits" in printed[0]


def same_tensors(folder, printed):
    """The exported folder has what the imported one had."""
    assert tensors(folder / "base" / "model.safetensors") == tensors(folder / "out" / "model.safetensors")


ERRANDS = {
    "lora": (chat, [
        "train --model base --init-from base --data chat.jsonl --objective instruct --lora-rank 8 "
        "--steps 200 --seq-len 64 --learning-rate 1e-2 --samples 0 --out lora",
        "export --checkpoint lora --merge --names huggingface --out merged",
        f"generate lora --prompt {QUESTION!r} --temperature 0"], answers),
    "vit": (pictures, ["train --model vit:tiny --data flowers --steps 60 --batch-size 16"], classes_are_found),
    "continue": (None, [
        "train --steps 20 --out run", "train --out run --resume --steps 40",
        "train --out run --resume --steps 60 --learning-rate 1e-4"], went_on),
    "plan": (None, ["plan --target h100:8 --model llama:3.1-8b --seq-len 2048 --batch-size 8",
                    "PASTED --dry-run --target h100:8"], dry),
    "gemma3": (lambda folder: model_folder(folder, GEMMA), [
        "train --model base --init-from base --steps 1 --seq-len 64 --samples 0 --out run",
        "export --checkpoint run --names huggingface --out out"], same_tensors),
}
STOPS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, asked = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
if asked:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=False) if tokenizer.chat_template else (
        tokenizer(f"<|user|>\\n{asked}\\n<|assistant|>\\n", return_tensors="pt").input_ids)
    out = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1]:]
    print(len(out), "tokens:", tokenizer.decode(out))
    sys.exit(len(out) == 60)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[[], *ERRANDS], default=[])
    parser.add_argument("--transformers", help="an interpreter that has it, and torch")
    args = parser.parse_args()
    for name in args.names or ERRANDS:
        prepare, commands, check = ERRANDS[name]
        with tempfile.TemporaryDirectory() as path:
            folder, printed = Path(path), []
            if prepare:
                prepare(folder)
            print(f"\n{name}")
            for command in commands:
                if printed:
                    command = command.replace("PASTED", "".join(re.findall(r"To train it: zero-jax (.*)", printed[-1])))
                start = time.perf_counter()
                printed.append(zero_jax(folder, command))
                print(f"$ zero-jax {command}    # {time.perf_counter() - start:.0f} s")
                lines = [line.rstrip() for line in printed[-1].splitlines() if line.strip()]
                print("    " + "\n    ".join(lines[-3:]), flush=True)
            check(folder, printed)
            if args.transformers and name in ("lora", "gemma3"):
                exported, asked = ("merged", QUESTION) if name == "lora" else ("out", "")
                subprocess.run([args.transformers, "-c", STOPS, str(folder / exported), asked], check=True)


if __name__ == "__main__":
    main()
