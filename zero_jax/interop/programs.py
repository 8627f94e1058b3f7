"""Functions of a model's parameters as programs that run without it: a folder of `jax.export`ed StableHLO and weights.

A folder has `<name>.jax_export` for each program, `weights*.safetensors`, `manifest.json`, `README.md` and `load.py`,
a loader that needs only JAX (`program_loader.py`).
"""

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from zero_jax.arguments import check_path
from zero_jax.distributed.agreement import all_or_none, is_first
from zero_jax.distributed.initialize import on_host
from zero_jax.errors import UsageError
from zero_jax.files import writing
from zero_jax.interop import program_loader
from zero_jax.interop.params_io import MAX_FILE_BYTES, export_tree, floating_dtype
from zero_jax.sharding.auto_axes import in_any_context
from zero_jax.tree import leaf_bytes, named_leaves
from zero_jax.versions import installed_version

PLATFORMS = ("cpu", "cuda", "tpu")
WEIGHTS, LOADER = "weights.safetensors", "load.py"

MAX_INSIDE_BYTES = 1 << 30
"""Of weights inside of a program: its file is a flatbuffer, which ends at 2 GiB."""


@in_any_context
def export_programs(path: Path | str, programs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], params: Any, *,
                    platforms: Sequence[str] = PLATFORMS, dtype: Any = None,
                    weights: Literal["beside", "inside"] = "beside", model: Mapping[str, Any] | None = None,
                    max_file_bytes: int = MAX_FILE_BYTES) -> list[Path]:
    """Writes functions of `params` as programs for one device that need neither the model nor zero_jax; returns paths.

    Each is traced and lowered for every platform at once by `jax.export`; nothing is compiled. Every process must call
    this; the first one writes, and the others return an empty list.

    Args:
      path: of a folder that does not exist, or is empty.
      programs: by name, (fun, args) of `fun(params, *args)`. args: arrays or `jax.ShapeDtypeStruct`s, whose dims may be
        symbolic (`jax.export.symbolic_shape`), so that the program takes any size. A program named `decode` is
        `fun(params, cache, tokens)` to (logits, cache), and `cache` is donated.
      params: nested dicts of arrays in logical shapes, as `step.params(state)` or `Checkpoints.load_params` returns,
        also sharded; they are gathered one at a time. A program that is loaded has them by their joined names.
      platforms: as `jax.export` names them: cpu, cuda, rocm, tpu.
      dtype: of floating weights, as "bfloat16"; None: as they are.
      weights: in safetensors files beside the programs, or inside of each of them as constants.
      model: what the loader is to know and the manifest says; `max_length` and `vocab_size` are checked by it.
      max_file_bytes: of tensors in one file.

    Raises UsageError for a folder that is not empty, for no program, for names that are no file names, for weights that
    are too large to be inside, without the package flatbuffers, and where a function cannot be traced with symbolic
    dims.
    """
    check_path("export_programs: path", path)
    folder = Path(path).expanduser()
    dtype = floating_dtype(dtype)
    _check(folder, programs, platforms, weights)
    leaves = dict(named_leaves(params))
    structure = jax.tree.structure(params)
    kinds = {name: dtype if dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else np.dtype(leaf.dtype)
             for name, leaf in leaves.items()}
    size = sum(leaf_bytes(leaf.shape, kinds[name]) for name, leaf in leaves.items())
    if weights == "inside" and size > MAX_INSIDE_BYTES:
        raise UsageError(f"weights=inside: {size:,} bytes are more than the {MAX_INSIDE_BYTES:,} that a program can "
                         "hold: leave them beside it.")
    inside = leaves if weights == "inside" else {}
    constants = {name: on_host(leaf).astype(kinds[name]) for name, leaf in inside.items()}

    def flat(fun: Callable[..., Any]) -> Callable[..., Any]:
        """`fun` of the weights by name, as the loader has them; of none that are constants."""
        def of_names(named: Mapping[str, Any], *args: Any) -> Any:
            values = {**constants, **named}
            return fun(jax.tree.unflatten(structure, [values[name] for name in leaves]), *args)

        return of_names

    abstract = {} if constants else {
        name: jax.ShapeDtypeStruct(leaf.shape, kinds[name]) for name, leaf in leaves.items()}

    def written() -> tuple[Path, dict[str, Any]] | None:
        if not is_first():
            return None
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            staged = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            staged.chmod(0o755)
            try:
                entries = {name: _write(staged / f"{name}.jax_export", flat(fun), [abstract, *args], platforms)
                           for name, (fun, args) in programs.items()}
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        return staged, entries

    done = all_or_none(written)

    def published() -> list[Path]:
        if done is None:
            return []
        staged, entries = done
        tensors = [{"file": file.name, "sha256": program_loader.file_digest(file)} for file in files
                   if file.suffix == ".safetensors"]
        manifest = {"format": program_loader.FORMAT, "version": program_loader.VERSION, "programs": entries,
                    "platforms": [*platforms], "weights": tensors, "num_weights": len(leaves), "weight_bytes": size,
                    "model": {**(model or {})}, "jax": jax.__version__, "zero_jax": installed_version("zero-jax")}
        manifest["sha256"] = program_loader.manifest_digest(json.loads(json.dumps(manifest)))
        with writing(folder):
            (staged / "README.md").write_text(_readme(folder.name, manifest))
            shutil.copyfile(str(program_loader.__file__), staged / LOADER)
            (staged / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
            if folder.exists():
                folder.rmdir()
            staged.rename(folder)
        return [folder / file.name for file in sorted(folder.iterdir())]

    try:
        files = [] if constants else export_tree(
            (done[0] if done else folder) / WEIGHTS, params, dtype=dtype, max_file_bytes=max_file_bytes)
        return all_or_none(published)
    except BaseException:
        if done is not None:
            shutil.rmtree(done[0], ignore_errors=True)
        raise


def _check(folder: Path, programs: Mapping[str, Any], platforms: Sequence[str], weights: str) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: give another.")
    if not programs or not all(isinstance(name, str) and name.isidentifier() for name in programs):
        raise UsageError(f"programs={[*programs]}: give at least one, each with a name of letters and digits.")
    if not platforms or isinstance(platforms, str):
        raise UsageError(f"platforms={platforms!r}: give a list such as {PLATFORMS}.")
    if weights not in ("beside", "inside"):
        raise UsageError(f"weights={weights!r}: give beside or inside.")
    check_flatbuffers()


def check_flatbuffers() -> None:
    """Raises UsageError without the package that `jax.export` writes programs with."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise UsageError("programs are written with the package flatbuffers: pip install 'zero-jax[serve]'.")


def _write(path: Path, fun: Callable[..., Any], args: Sequence[Any], platforms: Sequence[str]) -> dict[str, Any]:
    """Writes `fun` of `args` to `path`, and returns its entry in the manifest."""
    name = path.name.removesuffix(".jax_export")
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
    try:
        exported = export.export(jax.jit(fun), platforms=tuple(platforms))(*abstract)
    except (jax.errors.InconclusiveDimensionOperation, jax.errors.ConcretizationTypeError) as error:
        if not any(export.is_symbolic_dim(dim) for leaf in jax.tree.leaves(abstract) for dim in leaf.shape):
            raise
        raise UsageError(f"the program {name} cannot be traced with symbolic dims ({str(error).splitlines()[0]}): give "
                         "it arguments of fixed shapes (export: --batch-size, --seq-len).") from error
    path.write_bytes(bytes(exported.serialize()))
    first = len(jax.tree.leaves(abstract[0]))  # the weights: the manifest says their number
    return {"file": path.name, "sha256": program_loader.file_digest(path),
            "calling_convention_version": exported.calling_convention_version,
            "arguments": [str(each) for each in exported.in_avals[first:]],
            "results": [str(each) for each in exported.out_avals]}


def _readme(name: str, manifest: Mapping[str, Any]) -> str:
    programs = "\n".join(f"- `{each['file']}`: {', '.join(each['arguments'])} to {', '.join(each['results'])}"
                         for each in manifest["programs"].values())
    about = "".join(f"- {field}: {value}\n" for field, value in manifest["model"].items())
    files = ", ".join(f"`{each['file']}`" for each in manifest["weights"]) or "inside of each program"
    use = ('print(served.generate([[1, 2, 3]], num_tokens=20))  # token ids' if "decode" in manifest["programs"] else
           'print(served.forward([[1, 2, 3]]).shape)  # token ids to logits' if "forward" in manifest["programs"] else
           f'served.call("{next(iter(manifest["programs"]))}", ...)')
    return f"""# {name}: programs to serve a trained model with

Written by zero_jax {manifest["zero_jax"]} with jax {manifest["jax"]}. Neither zero_jax nor Flax is needed to run them:

```
pip install jax flatbuffers        # and the plugin of your accelerator, as jax[cuda13] or jax[tpu]
python load.py                     # lists what is here
```

```python
import load  # load.py of this folder

served = load.load("{name}")
{use}
```

## What is here

{programs}
- weights: {files}; {manifest["num_weights"]} arrays, {manifest["weight_bytes"]:,} bytes
- `manifest.json`: all of this for programs, with a SHA-256 of each file, which `load.py` checks
{about}
A dim with a name, such as `batch`, is any size; each new size is compiled once. The programs are StableHLO for one
device of {", ".join(manifest["platforms"])}, read by `jax.export.deserialize`. JAX promises to read such files for at
least 6 months after they were written, and a release up to 3 weeks older than the one that wrote them reads them, too.
For several devices give `load(..., place=...)` a function that shards each weight.
"""
