"""Writes the IR of all kernels, or compares two folders of it. Equal IR: the device's instructions are the same.

    PYTHONPATH=.:kernels python -m scripts.check.kernel_ir write FOLDER [--only moe] [--families glm-4-9b]
    PYTHONPATH=.:kernels python -m scripts.check.kernel_ir compare OLD NEW

`write` takes the launches of `compile_kernels`, and the compiler stops after its first stage, so it needs no GPU and
half a second a kernel. `compare` ignores lines of sources, names of values and of kernels, and the order of arguments
and constants. It prints the kernels that only one of the folders has, and ends with 1 if there are any.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

_LOCATION = re.compile(r"^#loc.*$| loc\((?:[^()\"]|\"[^\"]*\"|\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\))*\)", re.M)
_VALUE = re.compile(r"%[A-Za-z0-9_]+")
_CONSTANT = re.compile(r"\s*(%\w+) = arith\.constant (.*)$")
_ARGUMENT = re.compile(r"(%\w+): ((?:[^,{]|\{[^}]*\})+?)(?=, %|\) attr|\) \{|\)$)")


class _FirstStage:
    """Stands in for a compiled kernel: its IR after the first stage, its options and its name."""

    def __init__(self, src: Any, metadata_group: dict[str, str], hash: str) -> None:
        text = {Path(path).suffix: Path(path).read_text() for path in metadata_group.values()}
        options = json.loads(text[".json"])
        self.hash, self.ir, self.name = hash, text[".cubin"], src.fn.fn.__name__
        self.options = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl")}


def write(folder: Path, only: list[str], families: list[str]) -> int:
    """Write the IR of each kernel to a file of its own; returns their number."""
    from scripts.check import compile_kernels  # it leaves Triton's interpreter, so it comes first

    import triton.compiler.compiler as compiler  # isort: skip
    from triton import knobs  # isort: skip

    def last_stage(ir: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="kernel", shared=0)
        return str(ir).encode()

    def first_stage_only(backend: Any = None, stages: dict[str, Any] | None = None, *_: Any) -> tuple[str, str] | None:
        if stages is None:  # newer versions of Triton ask for a key of their cache first
            return "first stage", "first stage"
        first = next(iter(stages))
        kept = {first: stages[first], "cubin": last_stage}
        stages.clear()
        stages.update(kept)
        return None

    seen: set[str] = set()

    def keep(kernel: Any, seconds: float) -> None:
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            to = folder / kernel.name
            to.mkdir(parents=True, exist_ok=True)
            text = f"{json.dumps(kernel.options)}\n{kernel.ir}"
            (to / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.ir").write_text(text)

    knobs.runtime.add_stages_inspection_hook = first_stage_only
    knobs.compilation.always_compile = True
    compiler.CompiledKernel = _FirstStage  # type: ignore[misc,assignment]
    compile_kernels.compile_instead(90, keep)
    with tempfile.TemporaryDirectory() as cache:
        knobs.cache.dir = cache  # another process would take these kernels from Triton's cache and fail to load them
        for name, run in compile_kernels.cases((1, 32, 128), families):
            if any(part in name for part in only):
                run()
    return len(seen)


def canonical(ir: str) -> str:
    """The IR without what `compare` ignores."""
    options, *lines = _LOCATION.sub("", ir).splitlines()
    constants, body, arguments = {}, [], ""
    for line in lines:
        constant = _CONSTANT.match(line)
        if constant is not None:
            constants[constant[1]] = f"<{constant[2]}>"
        elif "tt.func public" in line:
            arguments = line
        elif line.strip():
            body.append(line)
    names: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        value = match[0]
        return constants.get(value) or names.setdefault(value, f"%{len(names)}")

    renamed_body = [_VALUE.sub(renamed, line) for line in body]
    used = sorted(f"{names[name]}: {kind}" for name, kind in _ARGUMENT.findall(arguments) if name in names)
    return "\n".join([options, *used, *renamed_body])


def compare(old: Path, new: Path) -> int:
    """Print the kernels that only one folder has; returns their number."""
    found: list[dict[str, list[Path]]] = []
    for folder in (old, new):
        by_ir: dict[str, list[Path]] = defaultdict(list)
        for file in sorted(folder.rglob("*.ir")):
            by_ir[canonical(file.read_text())].append(file)
        found.append(by_ir)
    alone = [file for one, other in (found, found[::-1]) for ir in one.keys() - other.keys() for file in one[ir]]
    print(*alone, f"{len(found[0])} and {len(found[1])} kernels, {len(alone)} in one folder alone", sep="\n")
    return len(alone)


def main() -> None:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes = commands.add_parser("write")
    writes.add_argument("folder", type=Path)
    writes.add_argument("--only", nargs="+", default=[""], help="launches whose name contains one of these")
    writes.add_argument("--families", nargs="+", default=[])
    compares = commands.add_parser("compare")
    compares.add_argument("old", type=Path)
    compares.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "write":
        print(f"{write(args.folder, args.only, args.families)} kernels")
    else:
        sys.exit(compare(args.old, args.new) > 0)


if __name__ == "__main__":
    main()
