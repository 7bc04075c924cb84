"""The house stays in order: imports point one way, and importing tilewise stays cheap."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise

SRC = Path(tilewise.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
FLOORS = [
    *("errors", "settings", "notices", "forks", "core", "archs", "ops", "engines", "problems"),
    *("data", "sweep", "learn", "selection", "export", "dispatch", "judge", "torch_ops"),
    *("functional", "report", "cli"),
]
"""A module may import its own floor and those before it."""

HEAVY = ("torch", "triton", "lightgbm", "sklearn", "polars", "pyarrow", "ray", "numpy")


def modules() -> list[Path]:
    return [p for p in SRC.rglob("*.py") if p.parent != SRC or p.stem in FLOORS]


def floor(module: str) -> str:
    return module.removeprefix("tilewise.").split(".")[0]


def imported(source: str) -> set[str]:
    """Every tilewise module that a text imports, at any depth of nesting, however it says so."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute: this test reads them"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    public = {f"tilewise.{name}" for name in tilewise.__all__}
    return {name for name in found if name.startswith("tilewise.")} - public


def why_forbidden(own: str, name: str) -> str | None:
    """Why a module of the floor `own` may not import `name`, or None."""
    target = floor(name)
    if target not in FLOORS:
        return f"{name} is on no floor"
    if FLOORS.index(target) > FLOORS.index(own):
        return f"{own} stands before {target}"
    if own in ("selection", "dispatch") and target in ("learn", "sweep"):
        return f"serving must not need {target}"
    return None


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    relative = path.relative_to(SRC)
    own = relative.parts[0].removesuffix(".py")
    for name in imported(path.read_text()):
        why = why_forbidden(own, name)
        assert why is None, f"{relative} must not import {name}: {why}"


@pytest.mark.parametrize(
    ("own", "line"),
    [
        ("core", "from tilewise import cli"),
        ("core", "from tilewise import cli as front"),
        ("core", "import tilewise.cli.app"),
        ("core", "from tilewise.cli import app"),
        ("data", "from tilewise.sweep.run import sweep"),
        ("selection", "from tilewise.sweep import timing"),
        ("dispatch", "def f():\n    from tilewise.learn.fit import fit"),
    ],
)
def test_no_import_hides(own: str, line: str) -> None:
    """However an import is written, it is seen."""
    (name,) = imported(line)
    assert why_forbidden(own, name)


def needed(tree: ast.AST, known: set[str]) -> set[str]:
    """The `known` modules that a text needs when it runs, inside functions, too."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name if name in known else name.rpartition(".")[0] for name in names} & known
        found |= needed(node, known)
    return found


def a_circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that need each other, and those on the way between such; or none."""
    left = set(imports)
    while True:
        asked_for = set().union(*(imports[name] for name in left))
        inside = {name for name in left & asked_for if imports[name] & left}
        if inside == left:
            return sorted(left)
        left = inside


def test_no_modules_need_each_other() -> None:
    """Not at the top, and not by an import that hides in a function."""
    trees = {}
    for path, tree in parsed():
        parts = path.relative_to(SRC.parent).with_suffix("").parts
        trees[".".join(parts).removesuffix(".__init__")] = tree
    imports = {name: needed(tree, set(trees)) - {name} for name, tree in trees.items()}
    assert a_circle(imports) == []
    assert a_circle(imports | {"tilewise.errors": {"tilewise.cli.app"}})


def test_importing_tilewise_is_light() -> None:
    code = (
        "import sys, tilewise; "
        f"print([m for m in {HEAVY!r} if m in sys.modules]); print(len(tilewise.__all__))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[0] == "[]"


def test_public_names_exist() -> None:
    for name in tilewise.__all__:
        assert getattr(tilewise, name) is not None
    assert sorted(tilewise.__all__) == sorted({*tilewise._PUBLIC, "__version__"})


def test_select_stays_a_function() -> None:
    """A sub-package of the same name would take its place once imported."""
    code = "import tilewise as tw, tilewise.cli.app; assert callable(tw.select), tw.select"
    subprocess.run([sys.executable, "-c", code], check=True)


FRONTS = (
    *("torch_ops", "functional.py", "dispatch/shipped.py", "cli/demo", "cli/doctor.py"),
    *("problems/networks", "__init__.py"),
)
"""What stands in front of single ops, tries one out, or has layers, and so knows it."""


def named_ops(source: str) -> list[str]:
    """Where a text names an op, to ask for it or in a table, or imports from an op's folder."""
    words = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)}
    texts = [word for word in words if isinstance(word, str) and re.fullmatch(r"\w+", word)]
    found = sorted(word for word in texts if word.split("_")[0] in OP_FOLDERS)
    modules = {".".join(name.split(".")[:3]) for name in imported(source)}
    return found + sorted(modules & {f"tilewise.ops.{folder}" for folder in OP_FOLDERS})


OP_FOLDERS = tuple(p.parent.name for p in (SRC / "ops").glob("*/problems.py"))


def test_only_an_op_s_folder_and_the_fronts_know_it() -> None:
    assert set(OP_FOLDERS) == {"gemm", "conv"}
    for path in modules():
        relative = str(path.relative_to(SRC))
        if not relative.startswith((*FRONTS, *(f"ops/{folder}" for folder in OP_FOLDERS))):
            found = named_ops(path.read_text())
            assert not found, f"{relative} knows {found}; ask the op instead"


@pytest.mark.parametrize(
    "text",
    [
        'x = 1 if op == "gemm" else 2',
        'if kernel.op != "conv_fwd": pass',
        'LEAST = {"gemm": 16, "conv": 8}',
        'if op.startswith("conv_"): pass',
        'if "gemm" in layer.ops: pass',
        "from tilewise.ops.conv.problem import ConvProblem",
        "from tilewise.ops.gemm import problem",
    ],
)
def test_asking_for_an_op_is_noticed(text: str) -> None:
    assert named_ops(text)


def parsed() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(SRC.rglob("*.py"))]


def is_kernel_body(function: ast.FunctionDef) -> bool:
    """Whether Triton or Gluon compiles it, whose functions know no structures of arguments."""
    return any(ast.unparse(d).split("(")[0].endswith("jit") for d in function.decorator_list)


def lines_of(function: ast.FunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def functions() -> list[tuple[str, ast.FunctionDef]]:
    """Every function but kernel bodies, and where it stands."""
    return [
        (f"{path.relative_to(SRC)}:{node.lineno} {node.name}", node)
        for path, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not is_kernel_body(node)
    ]


def elsewhere() -> list[tuple[Path, ast.Module]]:
    """Scripts, tests and examples."""
    folders = [ROOT / name for name in (".ci", "benchmarks", "examples", "tests")]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def test_no_function_and_no_file_is_long() -> None:
    long = []
    for path, tree in (*parsed(), *elsewhere()):
        found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        bodies = sum(lines_of(one) for one in found if is_kernel_body(one))
        names = [one.name for one in found if lines_of(one) > 60 and not is_kernel_body(one)]
        whole = ["the file"] * (len(path.read_text().splitlines()) - bodies > 500)
        long += [f"{path.relative_to(ROOT)}: {name}" for name in names + whole]
    assert not long, f"60 lines a function and 500 a file at most, kernels aside: {long}"


FROM_ELSEWHERE = ("torch_ops/__init__.py", "torch_ops/convolutions.py")
"""PyTorch's operators, whose schemas say the order of their arguments."""


def test_no_function_takes_dozens_of_arguments_by_place() -> None:
    """Commands are called by the names of their options."""
    wide = [
        where
        for where, f in functions()
        if len(f.args.posonlyargs) + len(f.args.args) > 8
        and not where.startswith(("cli/", *FROM_ELSEWHERE))
    ]
    assert not wide, f"8 arguments by place at most: {wide}"


ALIKE = frozenset({"Args", "Epilogue"})
"""What ops each have one of."""


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in ALIKE:
                places.setdefault(node.name, []).append(str(path.relative_to(SRC)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


SAME_ROLE = frozenset({"__init__", "contract", "vendor", "engine", "cpu", "gpu", "arguments"})
"""What ops, engines and exports each have one of, and what all ops share."""


def test_a_file_has_a_name_of_its_own() -> None:
    """Folders of ops have the same files on purpose, and commands the names of what they front."""
    in_ops = [{p.stem for p in (SRC / "ops" / folder).rglob("*.py")} for folder in OP_FOLDERS]
    alike = SAME_ROLE | set.intersection(*in_ops)
    places: dict[str, list[str]] = {}
    for path in SRC.rglob("*.py"):
        if path.relative_to(SRC).parts[0] != "cli" and path.stem not in alike:
            places.setdefault(path.stem, []).append(str(path.relative_to(SRC)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_the_architecture_names_every_folder_and_setting() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {p.name for p in SRC.iterdir() if p.is_dir() and not p.name.startswith("__")}
    missing = {name for name in folders - {"models"} if f"`{name}/`" not in text}
    assert not missing, f"folders that docs/architecture.md does not name: {missing}"
    read = set(re.findall(r"TILEWISE_[A-Z_]+", (SRC / "settings.py").read_text()))
    assert read == set(re.findall(r"TILEWISE_[A-Z_]+", text))
