"""The flags of a command, which are the fields of its config: read, explained, and named in messages. No JAX."""

import ast
import collections
import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from zero_jax.cli.model_lookup import nearest
from zero_jax.cli.options.choices import choices_of, kinds_of
from zero_jax.errors import UsageError

MAX_WIDTH, COLUMN = 100, 26
"""Columns of a help text, and where what options are begins."""

FIRST = {
    "train": "model init_from data tokenizer objective stage precision batch_size seq_len steps learning_rate remat "
             "lora_rank out resume",
    "plan": "target model stage batch_per_device seq_len precision optimizer remat accumulate offload tensor context "
            "lora_rank search json"}
"""The options of a command that --help shows; --help-all has the others, too."""

SUBJECTS = {
    "Model and training": "model vocab_size init_from stage precision optimizer moments betas eps batch_size "
                          "batch_per_device seq_len steps epochs weight_decay grad_clip_norm ema max_bad_steps seed",
    "Devices": "devices distributed heartbeat mesh replica tensor context hpz sequence_parallel partition_activations",
    "Memory": "remat loss_chunks tiling offload offload_fraction offload_disk offload_gib",
    "Microbatches and communication": "accumulate reduce gather overlap prefetch_weights quantize_weights "
                                      "quantize_gradients",
    "Folder of the run, and checkpoints": "out save_every max_to_keep resume save_to local_checkpoints local_every",
    "Devices that fail or hang": "check_replicas hang_after hang_exit",
    "What is compiled before a run": "target dry_run search remedies tokens prices deadline json png"}
"""The options of the classes that hold several subjects; those of another class are of its subject."""

TAKE_FILE = ("train", "inspect")
"""The commands that --config is an option of."""

OTHER_NAMES = {
    **dict.fromkeys(("lr", "peak_lr", "max_lr"), "learning_rate"),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum_steps", "grad_accum", "num_microbatches"),
                    "accumulate"),
    **dict.fromkeys(("max_steps", "num_steps", "train_steps", "total_steps"), "steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_length", "sequence_length", "block_size", "context_length",
                     "seq_length"), "seq_len"),
    **dict.fromkeys(("per_device_batch_size", "per_device_train_batch_size", "micro_batch_size",
                     "train_micro_batch_size_per_gpu"), "batch_per_device"),
    **dict.fromkeys(("global_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("max_grad_norm", "gradient_clipping", "clip_grad_norm", "grad_clip"), "grad_clip_norm"),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_path"), "model"),
    **dict.fromkeys(("output_dir", "output", "save_dir"), "out"),
    **dict.fromkeys(("dataset", "dataset_path", "train_file", "data_path"), "data"),
    **dict.fromkeys(("tensor_parallel_size", "tp", "tensor_parallel"), "tensor"),
    **dict.fromkeys(("context_parallel_size", "cp", "context_parallel"), "context"),
    **dict.fromkeys(("num_gpus", "n_gpus", "num_devices", "gpus"), "devices"),
    **dict.fromkeys(("temp",), "temperature"), **dict.fromkeys(("max_new_tokens", "max_tokens"), "tokens"),
    "lr_scheduler_type": "schedule", "warmup_ratio": "warmup", "optim": "optimizer", "zero_stage": "stage",
    "save_steps": "save_every", "eval_steps": "eval_every", "save_total_limit": "max_to_keep", "wd": "weight_decay",
    "adam_epsilon": "eps", "adam_betas": "betas",
    "num_labels": "num_classes", "lora_r": "lora_rank", "target_modules": "lora_targets",
    "dtype": "precision", "mixed_precision": "precision",
    "checkpoint_dir": "save_to", "report_to": "log_to", "checkpoint_path": "checkpoint", "ckpt": "checkpoint",
    # What none of ours is.
    "bf16": "give --precision bf16", "fp16": "give --precision fp16",
    "fp8": "give --precision bf16-fp8",
    "gradient_checkpointing": "give --remat full", "activation_checkpointing": "give --remat full",
    "cpu_offload": "give --offload optimizer", "offload_optimizer": "give --offload optimizer",
    "offload_param": "give --offload parameters", "load_in_4bit": "give --lora-rank 16 --lora-base nf4",
    "resume_from_checkpoint": "give --resume, and the run's folder as --out",
    "warmup_steps": "give --warmup, a fraction of all steps",
    "deepspeed": "zero_jax.interop.from_deepspeed reads its JSON",
    "nproc_per_node": "zero-jax launch starts several processes",
    "batch_per_device": "give --batch-size, the sequences of a step over all devices and microbatches"}
"""What others call an option, by its name of ours; or, with spaces, what to give where a command has none of either."""


def read_flags(command: str, config: type, args: Sequence[str]) -> Any:
    """The config of `command` whose fields `args` give, as --seq-len 64, --seq-len=64, --resume or --no-html.

    Raises UsageError, a line, for what is no option of it, a value that is none of the option's, and one left out.
    """
    hints, values, rest = get_type_hints(config, include_extras=True), {}, collections.deque(args)
    while rest:
        flag, has_value, text = rest.popleft().partition("=")
        if not flag.startswith("--"):
            raise UsageError(f"{command}: {flag} follows no option: write --NAME VALUE.")
        name = _field(command, flag, hints)
        if hints.get(name) is bool or name not in hints:
            if has_value:
                raise UsageError(f"{flag}={text}: it takes no value: give {flag}, or leave it out.")
            values[name.removeprefix("no_") if name not in hints else name] = name in hints
        elif _is_tuple(hints[name]):
            texts = [text] if has_value else []
            while rest and not rest[0].startswith("--"):
                texts.append(rest.popleft())
            if {int, float} & {*kinds_of(hints[name])}:  # numbers may have commas between them, too
                texts = [each for text in texts for each in text.split(",")]
            values[name] = tuple(_value(flag, each, hints[name]) for each in texts)
        else:
            if not has_value and (not rest or rest[0].startswith("--")):
                raise UsageError(f"{flag} has no value: give {shown_type(hints[name])}.")
            text = text if has_value else rest.popleft()
            if not text:
                raise UsageError(f"{flag} is empty: give {shown_type(hints[name])}.")
            values[name] = _value(flag, text, hints[name])
    if {"steps", "epochs"} <= values.keys():
        raise UsageError(f"{command}: --steps and --epochs both say when the run ends: give one of them.")
    missing = [flag_of(field.name) for field in dataclasses.fields(config)
               if field.default is dataclasses.MISSING and field.name not in values]
    if missing:
        raise UsageError(f"{command} needs {' and '.join(missing)}: zero-jax {command} --help says what it takes.")
    return config(**values)


def _field(command: str, flag: str, hints: Mapping[str, Any]) -> str:
    """The field of a flag, or of what others call it; no_NAME for one that switches NAME off."""
    name = flag[2:].replace("-", "_")
    other = OTHER_NAMES.get(name, name)
    for each in (name, other):
        if each in hints or each.startswith("no_") and hints.get(each[3:]) is bool:
            return each
    advice = next((text for text in (other, OTHER_NAMES.get(other, "")) if " " in text), "")
    given = re.search(r"--([a-z-]+)", advice)
    if advice and (given is None or given[1].replace("-", "_") in hints):
        raise UsageError(f"{command} has no option {flag}: {advice}.")
    close = difflib.get_close_matches(flag, [*map(flag_of, hints)], n=1)
    raise UsageError(f"{command} has no option {flag}" + (
        f". Did you mean {close[0]}?" if close else f": zero-jax {command} --help-all lists all."))


def _value(flag: str, text: str, hint: Any) -> Any:
    kinds = list(kinds_of(hint))
    if type(None) in kinds and text == "None":
        return None
    if choices := {str(each): each for each in choices_of(hint)}:
        if text not in choices:
            raise UsageError(f"{flag} {text}: it is none of the choices{nearest(text, list(choices))}")
        return choices[text]
    if int in kinds or float in kinds:
        try:
            return _whole(text) if int in kinds else float(text)
        except (ValueError, ArithmeticError):
            raise UsageError(f"{flag} {text}: give {'a whole' if int in kinds else 'a'} number.") from None
    return Path(text) if Path in kinds else text


def _whole(text: str) -> int:
    """The integer that `text` is, which may be written as 1e3.

    >>> _whole("1e3"), _whole("-12"), _whole("2.5e1")
    (1000, -12, 25)
    """
    number = Decimal(text)
    if number.adjusted() > 30 or number != number.to_integral_value():  # 1e999999999 has as many digits
        raise ArithmeticError(text)
    return int(number)


def _is_tuple(hint: Any) -> bool:
    return any(get_origin(kind) is tuple for kind in kinds_of(hint))


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"


def shown_type(hint: Any) -> str:
    """What follows the flag of a field of this type.

    >>> from typing import Literal
    >>> shown_type(int | None), shown_type(tuple[str, ...]), shown_type(Literal["a", "b"]), shown_type(bool)
    ('INT', 'TEXT ...', '{a,b}', '')
    """
    names = {int: "INT", float: "NUMBER", Path: "PATH", str: "TEXT"}
    choices = ",".join(map(str, choices_of(hint)))
    kind = f"{{{choices}}}" if choices else next((names[each] for each in kinds_of(hint) if each in names), "")
    return kind + " ..." * _is_tuple(hint)


@functools.cache
def texts_of(config: type) -> dict[str, str]:
    """What the fields of a config are, in a line, by name: the text below each in the source of its class."""
    texts, names = {}, [field.name for field in dataclasses.fields(config)]
    for options in reversed(config.__mro__[:-1]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
        assert isinstance(definition, ast.ClassDef)
        for node, after in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                text = " ".join(ast.literal_eval(after.value).split())
                texts[ast.unparse(node.target)] = in_flags(text, names)
    return texts


def subjects_of(config: type) -> dict[str, list[str]]:
    """The fields of a config by their subject, in the order of a help text."""
    known = {name: subject for subject, names in SUBJECTS.items() for name in names.split()}
    subjects: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for options in reversed(config.__mro__):
        for name in options.__dict__.get("__annotations__", {}):
            subjects.setdefault(known.get(name) or first_sentence(options.__doc__ or "").rstrip("."), []).append(name)
    order = " ".join(SUBJECTS.values()).split()
    return {subject: sorted(names, key=order.index) if subject in SUBJECTS else names
            for subject, names in subjects.items() if names}


def first_sentence(text: str) -> str:
    """The first sentence of `text`, in one line."""
    line = " ".join(text.split())
    end = line.find(". ")
    return line[:end + 1] if end >= 0 else line


def help_text(command: str, config: type, *, program: str, everything: bool, width: int) -> str:
    """The help of a command: the first sentence of each option of `FIRST`, or all of all options by subject."""
    fields, hints = {field.name: field for field in dataclasses.fields(config)}, get_type_hints(
        config, include_extras=True)
    first = FIRST.get("train" if command == "inspect" else command, "").split()
    short = bool(first) and not everything
    texts = {name: first_sentence(text) if short else text for name, text in texts_of(config).items()}
    subjects = ({"Options that matter first": first} if short
                else subjects_of(config) if first else {"Options": list(texts)})
    lines = [f"usage: {program} {command} [options]", "", *_wrapped(inspect.getdoc(config) or "", width, 0)]
    for subject, names in subjects.items():
        lines += ["", *_wrapped(f"{subject}:", width, 0)]
        for name in names:
            default = fields[name].default
            value = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
            note = (" (required)" if default is dataclasses.MISSING else " (default: on)" if default is True
                    else "" if default in (None, False, (), "") else f" (default: {value})")
            flag = flag_of(name) + f", {flag_of(f'no_{name}')}" * (default is True)
            lines += _option(flag, shown_type(hints[name]), texts[name] + note, width)
    if short:
        lines += ["", f"{program} {command} --help-all explains all {len(fields)} options."]
    return "\n".join(lines)


def commands_text(commands: Mapping[str, type], *, program: str, width: int) -> str:
    """The help of the program: its commands, a sentence each."""
    said = {name: first_sentence(config.__doc__ or "") for name, config in commands.items()}
    said |= {"models": "What --model takes.", "targets": "What --target takes."}
    return "\n".join([
        f"usage: {program} COMMAND [options]", "",
        *_wrapped("ZeRO for JAX: any Flax model at any stage; matches single-device training.", width, 0), "",
        *(line for name, text in said.items() for line in _option(name, "", text, width)), "",
        *_wrapped(f"{program} COMMAND --help explains the options of a command, {program} --version its versions.",
                  width, 0)])


def _option(flag: str, kind: str, text: str, width: int) -> list[str]:
    """The lines of an option: what it is stands beside its flag where that is short."""
    begin, lines = f"  {flag} {kind}".rstrip(), _wrapped(text, width, COLUMN)
    if len(begin) < COLUMN - 1:
        return [begin.ljust(COLUMN) + lines[0].strip(), *lines[1:]]
    return [*_wrapped(begin.strip().replace(",", ", ") if len(begin) > width else begin.strip(), width, 2), *lines]


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=" " * indent, subsequent_indent=" " * indent,
                         break_on_hyphens=False)


def in_flags(message: str, names: Collection[str]) -> str:
    """`message` as the command line says it: with flags in place of fields of the names.

    >>> in_flags("seq_len=60 does not divide over context=8: leave html=True out", ["seq_len", "context", "html"])
    '--seq-len 60 does not divide over --context 8: leave --html out'
    """
    def said(match: re.Match[str]) -> str:
        name, value = match[1] or match[3], match[2]
        if match[3]:
            return flag_of(name)
        if value in ("True", "False"):
            return flag_of("no_" * (value == "False") + name)
        return f"{flag_of(name)} " + re.sub("[(),']", "", value or "")

    either, several = ("|".join(sorted(each, key=len, reverse=True)) or "(?!)"
                       for each in (names, [name for name in names if "_" in name]))
    # A word such as `data` is an option before an equals sign, or where a message begins with it.
    message = re.sub(rf"(?:^|(?<=leave ))({either})(?=: |, | is empty| has | without | out\b)",
                     lambda match: flag_of(match[1]), message)
    return re.sub(rf"(?<![\w/.'\"=-])(?:({either})=(\([^()]*\)|True\b|False\b)?|({several})\b)", said, message)
