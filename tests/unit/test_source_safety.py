"""Nothing that is read is ever run: no pickle, no eval and no code of a checkpoint, anywhere in the sources."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("rollout", "rollout_gateway", "trainer_bridge", "kernels/rollout_kernels", "scripts")

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {"torch.load", "np.load", "numpy.load", "os.system", "os.popen"}
METHODS = {"recv_pyobj", "send_pyobj", "load_torch_file", "loads_pickle"}


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "?")


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        yield from ((node.lineno, f"import {name}") for name in names if name.split(".")[0] in MODULES)  # type: ignore[attr-defined]
        yield from ((node.lineno, f"import {name}") for name in names if name in CALLS)  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id in BUILTINS:
            yield node.lineno, node.id
        if isinstance(node, ast.Attribute) and (dotted(node) in CALLS or node.attr in METHODS):
            yield node.lineno, dotted(node)
        if isinstance(node, ast.keyword):
            constant = node.value.value if isinstance(node.value, ast.Constant) else ...
            if node.arg == "trust_remote_code" and constant is not False:
                yield node.value.lineno, "trust_remote_code"
            if node.arg in ("allow_pickle", "shell") and constant is not False:
                yield node.value.lineno, f"{node.arg}"
            if node.arg == "weights_only":
                yield node.value.lineno, "weights_only: a format that can hold code"


@pytest.mark.parametrize("folder", SOURCES)
def test_no_source_reads_anything_as_code(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no sources in {folder}"
    found = [
        f"{file.relative_to(ROOT)}:{line}: {what}"
        for file in files
        for line, what in findings(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import torch.utils.data, cloudpickle.x",
        "eval('1')",
        "f = exec",
        "__import__('os')",
        "torch.load(file, mmap=True)",
        "from torch import load",
        "np.load(file)",
        "AutoConfig.from_pretrained(x, trust_remote_code=True)",
        "AutoConfig.from_pretrained(x, trust_remote_code=setting)",
        "from yaml import load",
        "socket.recv_pyobj()",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_check_finds_what_it_looks_for(code: str) -> None:
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize("code", ["model.eval()", "re.compile('x')", "torch.compile(f)", "tl.load(pointer)"])
def test_the_check_passes_what_only_looks_like_it(code: str) -> None:
    assert not list(findings(ast.parse(code)))
