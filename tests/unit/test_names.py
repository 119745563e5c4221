"""The rule that one name means one thing: public classes, and modules, of all packages."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "rollout", "rollout_gateway", "trainer_bridge", "kernels"
#: Each folder of a feature has a module `feature`: the class that the engine knows.
FEATURES = ROOT / "rollout/engine/features"
#: Each module has the name of its command.
COMMANDS = ROOT / "rollout/cli"
#: Words with one meaning: where it is at home, files or folders. No name that is defined elsewhere has the word.
AT_HOME = {
    # one request of a conversation
    "turn": (
        "rollout/constraints/thoughts.py",
        "rollout/engine/kv/",
        "rollout/engine/messages/statuses.py",
        "rollout/engine/sequence/",
        "rollout_gateway/",
        "rollout/service/fork_sources.py",
        "trainer_bridge/client/",
        "trainer_bridge/integrations/trl_generation.py",
    ),
    # the orders of one kind that the ranks of a tensor group carry out
    "lane": ("rollout/engine/device/rank_orders.py", "rollout/engine/kv/", "rollout/ranks/", "rollout/worker.py"),
    # where a member sits in a process group of a transport
    "seat": ("trainer_bridge/transports/nccl/",),
    # a row in flight whose token is dropped
    "zombie": ("rollout/engine/", "rollout/metrics/"),
}


def modules() -> list[Path]:
    """The modules of all packages."""
    found = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(found) > 300
    return [file for file in found if file.stem not in ("__init__", "__main__")]


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for file in modules():
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(ROOT)))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice


def test_no_two_modules_of_a_package_have_one_name() -> None:
    homes: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in modules():
        if COMMANDS not in file.parents and (file.name != "feature.py" or FEATURES not in file.parents):
            path = file.relative_to(ROOT)
            homes[path.parts[0], file.stem].append(str(path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def defined(tree: ast.Module) -> Iterator[str]:
    """The names of classes, functions, parameters, attributes and constants that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.arg():
                yield node.arg if isinstance(node, ast.arg) else node.name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign():
                yield from (each.id for each in node.targets if isinstance(each, ast.Name) and each.id.isupper())


def words(name: str) -> set[str]:
    """The words of a name, each without an s at its end."""
    return {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_names_are_split_into_words() -> None:
    assert words("_LaneProgress_of_turns") == {"lane", "progres", "of", "turn"} and words("TURNS_2B") == {"turn", "b"}


def test_a_word_with_one_meaning_names_nothing_elsewhere() -> None:
    wrong, at_home = [], set()
    for file in modules():
        path = file.relative_to(ROOT).as_posix()
        for name in defined(ast.parse(file.read_text(encoding="utf-8"))):
            for word in AT_HOME.keys() & words(name):
                if path.startswith(AT_HOME[word]):
                    at_home.add((word, next(home for home in AT_HOME[word] if path.startswith(home))))
                else:
                    wrong.append((word, name, path))
    assert not wrong
    assert at_home == {(word, home) for word, homes in AT_HOME.items() for home in homes}, "a home has no such name"


#: Modules of the engine that see features by name: they check the settings and the model at the start, and find sizes.
AT_START = {"build.py", "build_kv.py", "build_steps.py", "model_checks.py", "sizing.py"}
#: Words of features.
OF_FEATURES = {"adapter", "image", "pixel", "draft", "verify", "score", "top", "expert", "routing"}


def used(tree: ast.Module) -> Iterator[str]:
    """All names in the code of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.alias(name=name):
                yield name
    yield from defined(tree)


def test_the_core_of_the_engine_knows_no_word_of_a_feature() -> None:
    engine = ROOT / "rollout/engine"
    beside = {FEATURES, engine / "messages"}  # messages have the fields of all features
    core = [file for file in engine.rglob("*.py") if beside.isdisjoint(file.parents) and file.name not in AT_START]
    names = {(file.name, name) for file in core for name in used(ast.parse(file.read_text("utf-8")))}
    assert len(core) > 40 and not [each for each in names if words(each[1].replace("top_k", "")) & OF_FEATURES]
    of_features = (defined(ast.parse(file.read_text("utf-8"))) for file in FEATURES.rglob("*.py"))
    assert {word for names in of_features for name in names for word in words(name)} >= OF_FEATURES, "no feature has it"
