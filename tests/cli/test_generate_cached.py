"""Generation with a cache of keys and values, from sharded parameters: that of whole sequences on one device."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import command_line
from support.oracle import slow

import zero_jax
from models import gpt2, llama
from zero_jax.checkpoint.checkpoint import Checkpoints
from zero_jax.cli.environment import shown_text
from zero_jax.cli.model_lookup import find_model
from zero_jax.cli.step_from_config import step_of
from zero_jax.cli.train_config import TrainConfig
from zero_jax.cli.training.resume import fixed
from zero_jax.cli.weights.file_configs import ChatConfig, GenerateConfig
from zero_jax.cli.weights.generate import likeliest, sample_with_cache
from zero_jax.cli.weights.generate_command import chat_command, check_prompt
from zero_jax.data.conversations import load_template
from zero_jax.data.response_rows import response_text
from zero_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from zero_jax.errors import UsageError

PROMPT, NEW = 5, 7


def greedy(model, params, prompts):
    """Without a cache: the whole sequence for each token; what follows a token does not change it."""
    tokens = np.pad(prompts, ((0, 0), (0, NEW)))
    forward = jax.jit(lambda params, tokens: model.apply({"params": params}, tokens).argmax(-1))
    for at in range(PROMPT, PROMPT + NEW):
        tokens[:, at] = forward(params, tokens)[:, at - 1]
    return tokens[:, PROMPT:]


def as_linen(params):
    """Parameters of an NNX model by Linen's names: a list of blocks is blocks_0, blocks_1, ..."""
    blocks = params.get("blocks", {"scanned": None})
    if not all(isinstance(at, int) for at in blocks):
        return params
    others = {name: tree for name, tree in params.items() if name != "blocks"}
    return others | {f"blocks_{at}": block for at, block in blocks.items()}


SIZES = {"max_length": 16, "width": 32, "vocab_size": 40}


@pytest.mark.grid
@pytest.mark.parametrize(("name", "stage", "change"), [
    slow("gpt2", 3, {"remat": True, "dropout": 0.3}),
    slow("llama", 1, {"remat": True, "scan_layers": False, "qk_norm": True}),
    slow("gpt2_nnx", 0, {"scan_layers": False}), slow("llama_nnx", 3, {"tied": True, "qk_norm": True})])
def test_tokens_with_a_cache_are_those_without(name, stage, change):
    choice = find_model(f"{name}:tiny")
    config = dataclasses.replace(choice.config, **SIZES, **change)
    choice, linen = dataclasses.replace(choice, config=config), {"gpt2": gpt2, "llama": llama}[name.partition("_")[0]]
    prompts = np.random.default_rng(0).integers(0, 40, (8, PROMPT)).astype(np.int32)
    step = zero_jax.make_zero_train_step(choice.build(config), stage)
    batch = {"inputs": prompts, "targets": prompts}
    state = step.init(jax.random.key(0), batch)
    # Weights of an initialisation hardly tell tokens apart: larger ones do.
    params = jax.tree.map(lambda leaf: 8 * leaf, jax.device_get(step.params(state)))
    state = step.init(jax.random.key(0), batch, params=params)
    decoder, model, params = choice.decoder_for(PROMPT + NEW), linen.build(config), as_linen(params)
    evaluate = step.evaluator(sample_with_cache(decoder, num_tokens=NEW, temperature=0.0))
    found = np.asarray(evaluate(state, {"inputs": prompts}, jax.random.key(1)))
    expected = greedy(model, params, prompts)
    np.testing.assert_array_equal(found, expected)
    # Negative controls: other parameters and other prompts go on with other tokens; a temperature draws others.
    other = jax.tree.map(lambda leaf: -leaf, params)
    assert not np.array_equal(expected, greedy(model, other, prompts))
    assert not np.array_equal(expected, greedy(model, params, np.roll(prompts, 1, axis=1)))
    drawn = step.evaluator(sample_with_cache(decoder, num_tokens=NEW, temperature=5.0))
    assert not np.array_equal(np.asarray(drawn(state, {"inputs": prompts}, jax.random.key(1))), expected)


def test_a_cache_without_positions_goes_on_with_other_tokens():
    """What the rows above would see: keys that are rotated as if each call began the text."""
    config = dataclasses.replace(llama.PRESETS["tiny"], **SIZES, scan_layers=False, num_layers=1)
    model = llama.build(config)
    tokens = np.random.default_rng(0).integers(0, 40, (2, 8)).astype(np.int32)
    params = jax.tree.map(lambda leaf: 8 * leaf, jax.jit(model.init)(jax.random.key(0), tokens)["params"])
    whole = jax.jit(model.apply)({"params": params}, tokens)
    decoder = llama.decoder(config, 8)

    @jax.jit
    def last(params, kept):
        _, cache = decoder.apply({"params": params}, tokens[:, :-1], mutable=["cache"])
        cache = cache["cache"] | {"length": kept * cache["cache"]["length"]}
        logits, _ = decoder.apply({"params": params, "cache": cache}, tokens[:, -1:], mutable=["cache"])
        return logits[:, 0]

    np.testing.assert_allclose(last(params, 1), whole[:, -1], rtol=1e-4, atol=1e-4)
    assert np.abs(last(params, 0) - whole[:, -1]).max() > 0.1


@pytest.mark.parametrize(("ids", "wrong"), [([-5, 3], "-5"), ([3, 256, 2], "256")])
def test_the_id_that_is_wrong_is_told(ids, wrong):
    sizes = gpt2.PRESETS["tiny"]
    check_prompt("a prompt", [0, 255], 1, sizes)
    with pytest.raises(UsageError, match=f"has the id {wrong}, and the model's vocab_size is 256"):
        check_prompt("a prompt", ids, 1, sizes)


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [
    (None, None, [0, 1, 2, 3, 4]), (2, None, [1, 3]), (9, None, [0, 1, 2, 3, 4]), (1, 0.5, [3]),
    (None, 0.5, [3]), (None, 0.51, [1, 3]), (None, 0.76, [1, 2, 3]), (3, 0.9, [1, 2, 3]), (None, 1e-6, [3])])
def test_the_likeliest_tokens_are_kept(top_k, top_p, kept):
    logits = jnp.log(jnp.array([[0.04, 0.25, 0.2, 0.5, 0.01], [0.5, 0.25, 0.2, 0.04, 0.01]]))
    found = np.asarray(likeliest(logits, top_k, top_p))
    assert np.flatnonzero(np.isfinite(found[0])).tolist() == kept
    assert np.array_equal(found[0][kept], np.asarray(logits)[0][kept])  # and these are as they were
    assert np.isfinite(found[1]).sum() == len(kept) and np.isfinite(found[1][0])  # each row by itself


def test_prompts_of_a_file(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo words\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a\\nb"}\n{"prompt": "c"}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n{"text": "c"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "empty.txt").write_text("\n")

    def config(name, **options):
        return GenerateConfig(str(tmp_path), prompt_file=tmp_path / name, **options)

    assert config("lines.txt", prompt=("zero",)).prompts == ("zero", "one", "two words")
    assert config("rows.jsonl").prompts == ("a\nb", "c")
    for name, message in {"other.jsonl": "a text in each field prompt", "latin.txt": "cannot be read as text",
                          "empty.txt": "give one prompt a line", "none.txt": "cannot be read as text"}.items():
        with pytest.raises(UsageError, match=message):
            config(name).check()
    with pytest.raises(UsageError, match="latin.txt exists, and is not replaced"):
        config("lines.txt", out=tmp_path / "latin.txt").check()


def chat(config: ChatConfig, *lines: str) -> list[str]:
    """What is said to `lines`, which are typed one after another."""
    said, typed = list[str](), iter(lines)

    def read(_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    chat_command(config, read, said.append)
    return said


@pytest.mark.slow
def test_the_command_continues_prompts_with_the_parameters_of_a_checkpoint(tmp_path, monkeypatch):
    # There are 8 already.
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)
    config = TrainConfig(model="gpt2:tiny", batch_size=8, seq_len=16)
    step = step_of(config, find_model(config.model), jax.devices())
    batch = {name: jax.ShapeDtypeStruct((8, 16), jnp.int32) for name in ("inputs", "targets")}
    state = step.init(jax.random.key(0), batch)
    params = jax.tree.map(lambda leaf: 4 * leaf, jax.device_get(step.params(state)))
    state = step.init(jax.random.key(0), batch, params=params)
    with Checkpoints(tmp_path / "checkpoints", keep_last=4) as checkpoints:
        checkpoints.save(step, state, at=1, config=fixed(config), wait=True)
        checkpoints.save(step, state, at=2, config=fixed(config) | {"data": ["x.npy"]}, wait=True)
        checkpoints.save(step, state, at=3, config=fixed(config) | {"tokenizer": "t.json"}, wait=True)
        checkpoints.save(step, state, at=4, config=fixed(config) | {"model": "t5:tiny"}, wait=True)
    model = gpt2.build(gpt2.PRESETS["tiny"])

    def generate(at, prompt, *options):
        return command_line.run("generate", "--checkpoint", str(tmp_path), "--at", at, "--prompt", prompt,
                                "--temperature", "0", "--tokens", str(NEW), *options)

    expected = greedy(model, params, np.array([list(b"hello")], np.int32))[0].tolist()
    done = generate("2", " ".join(map(str, b"hello")))
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == " ".join(map(str, expected)), done.stderr
    done = generate("1", "hello")
    assert done.stdout == f"--- hello\n{shown_text(ByteTokenizer().decode(expected))}\n", done.stderr
    third = shown_text(ByteTokenizer().decode(expected[2:3]))
    assert generate("1", "hello", "--stop", "never", third).stdout.endswith(
        f"\n{shown_text(ByteTokenizer().decode(expected)).partition(third)[0]}\n")
    (tmp_path / "prompts.txt").write_text("hello\nhello\nolleh\n")
    done = generate("1", "hello", "--top-k", "1", "--temperature", "9", "--prompt-file", str(tmp_path / "prompts.txt"),
                    "--out", str(tmp_path / "texts.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert done.stdout == f"4 texts in {tmp_path}/texts.jsonl\n" and [row["prompt"] for row in rows][2:] == [
        "hello", "olleh"]
    assert [row["text"] == ByteTokenizer().decode(expected) for row in rows] == [True, True, True, False]
    with pytest.raises(UsageError, match="was not trained on messages"):
        chat_command(ChatConfig(str(tmp_path), at=1))
    said = chat(ChatConfig(str(tmp_path), at=1, template="chat", tokens=2, temperature=0), "a", "a", "/new", "a")
    assert said[0] == said[2] != said[1]  # which has the first in mind
    for at, prompt, options, message in (
            ("3", "hello", (), "the run's tokenizer was t.json: give it with --tokenizer"),
            ("2", "hello", (), "its tokenizer is not known"),
            ("2", "256", (), "has the id 256, and the model"),
            ("1", "h" * 60, (), "with --tokens 7 that is more than max_length=64"),
            ("4", "hello", (), "has no decoder(config)"), ("1", "hello", ("--ema",), "the run kept no average")):
        done = generate(at, prompt, *options)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\\n{{ m.content }}<|im_end|>\\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}")


@pytest.fixture
def tokenizer(tmp_path):
    """A folder of a tokenizer of bytes and special tokens, whose template ends a response with another than its eos."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = [token for token in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
                if token < "\x7f" or token in "\u0120\u010a"]  # of ASCII, so that gpt2:tiny has ids for more
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": CHATML.encode().decode("unicode_escape"), "eos_token": "<|endoftext|>"}))
    return folder


def test_a_response_ends_where_the_template_ends_it(tokenizer):
    bpe, template = load_tokenizer(tokenizer), load_template(tokenizer)
    ids = {name: bpe.encode([name])[0][0] for name in ("<|endoftext|>", "<|im_end|>", "<|im_start|>")}
    four = [*bpe.encode(["four"])[0]]
    assert response_text([*four, ids["<|im_end|>"], *four], template, bpe) == "four"
    assert response_text([*four, ids["<|endoftext|>"], *four], None, bpe) == "four"
    assert response_text([*four, ids["<|endoftext|>"], *four], template, bpe) == "four"
    assert response_text(four, template, bpe) == "four"
    # Negative controls: texts have no end of a message; a template of bytes ends with text.
    assert response_text([*four, ids["<|im_end|>"], *four], None, bpe) == "fourfour"
    end, raw = "four<|im_end|>\n<|im_start|>user\nfour", ByteTokenizer()
    assert response_text([*raw.encode([end])[0]], template, raw) == "four"
    assert response_text([*raw.encode([end])[0]], None, raw) == end


@pytest.mark.slow
def test_a_chat_tuned_run_is_asked_in_its_template(tmp_path, tokenizer, monkeypatch):
    """Tuned on one answer until it knows it: the template and the end token of the run give it back, alone."""
    monkeypatch.setattr("zero_jax.cli.weights.saved_model.simulate_devices", lambda number: None)  # there are 8
    rows = [{"messages": [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": "eight"}]}
            for n in range(16)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = ("--tokenizer", str(tokenizer))
    done = command_line.run(
        "train", "--model", "gpt2:tiny", "--data", str(tmp_path / "chat.jsonl"), "--out", str(tmp_path / "run"),
        "--objective", "instruct", "--documents", "pad", *folder, "--seq-len", "48", "--batch-size", "8", "--devices",
        "8", "--steps", "60", "--learning-rate", "0.01", "--samples", "0")
    assert done.returncode == 0, done.stderr

    def asked(*options):
        done = command_line.run("generate", "--checkpoint", str(tmp_path / "run"), "--prompt", "4 + 4?",
                                "--temperature", "0", "--tokens", "16", *options)
        return done.stdout.partition("\n")[2].strip() if done.returncode == 0 else done.stderr

    assert asked(*folder) == asked() == "eight"  # the run names its tokenizer
    said = chat(ChatConfig(str(tmp_path / "run"), tokens=8, temperature=0),
                "4 + 4?", "", "2 + 2?", "/new", "7 + 7?", "x" * 70)
    assert said[0] == said[2] == "eight" and len(said) == 4 and "more than max_length=64" in said[3]
    assert asked(*folder, "--template", "none") != "eight"  # negative control
    (tokenizer / "tokenizer_config.json").write_text("{}")
    assert "became text by another template than <|role|>, then the text" in asked(*folder)
