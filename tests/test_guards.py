"""House rules that no other tool holds: what is in the tree, and what must never be."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import flower_geo

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = ROOT / "requirements" / "lock.txt"
GENERATED = ("_pb2.py", "_pb2_grpc.py")
# folders whose code runs outside the tests
SHIPPED = ("flower_geo", "strategies", "apps", "benchmarks", "tools", "examples")

MAX_LINES = 400
MAX_BYTES = 5 * 2**20


def _files() -> list[Path]:
    """Files of the checkout or unpacked sdist, links left out, relative to the root."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    if (ROOT / ".git").exists():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        listed = [Path(name) for name in done.stdout.split("\0") if name]
    else:
        skipped = re.compile(r"(?:^|/)(?:\.|build/|dist/|runs/|artefacts/|__pycache__/)")
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
        listed = [path for path in found if not skipped.search(path.as_posix())]
    return sorted(p for p in listed if (ROOT / p).is_file() and not (ROOT / p).is_symlink())


def _python(*folders: str) -> list[Path]:
    """Python files that people wrote, in the given top folders or anywhere."""
    return [
        path
        for path in _files()
        if path.suffix == ".py"
        and not path.name.endswith(GENERATED)
        and (not folders or path.parts[0] in folders)
    ]


def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def _text(path: Path) -> str | None:
    try:
        return (ROOT / path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    if parts[0] == "strategies":
        parts = ("flower_geo", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, those within functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        if ast.unparse(target) == "__all__":
            return [str(name) for name in ast.literal_eval(value)]
    return None


MODULES = [p for p in _python("flower_geo", "strategies") if p.name != "__main__.py"]


@pytest.mark.parametrize("path", MODULES, ids=_module_name)
def test_all_names_what_a_module_offers(path: Path) -> None:
    tree = _tree(path)
    declared = _declared(tree)
    assert declared is not None, f"{path}: no __all__"
    assert len(declared) == len(set(declared)), f"{path}: a name stands twice in __all__"
    module = importlib.import_module(_module_name(path))
    missing = [name for name in declared if not hasattr(module, name)]
    assert not missing, f"{path}: __all__ names what is not there: {missing}"
    # a decorated function (a command, a registered codec) is reached by other ways than its name
    public = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not (isinstance(node, ast.FunctionDef) and node.decorator_list)
    }
    assert not public - set(declared), f"{path}: public, but not in __all__"


def test_modules_stay_short() -> None:
    lengths = {str(p): len((_text(p) or "").splitlines()) for p in _python()}
    assert not {name: n for name, n in lengths.items() if n > MAX_LINES}


def test_no_module_is_a_drawer() -> None:
    drawers = re.compile(r"^_?(utils?|helpers?|misc|common)$|_utils?$")
    assert not [str(p) for p in _python() if drawers.search(p.stem)]


def test_annotations_are_lazy_everywhere() -> None:
    line = "from __future__ import annotations"
    bare = [p for p in _python() if _tree(p).body[1:] and line not in (_text(p) or "")]
    assert not [str(p) for p in bare]


def test_files_are_small_and_text_is_utf8() -> None:
    big = {str(p): (ROOT / p).stat().st_size for p in _files()}
    assert not {name: size for name, size in big.items() if size > MAX_BYTES}
    texts = {".py", ".md", ".toml", ".txt", ".json", ".yaml", ".yml", ".proto", ".ipynb", ".css"}
    assert not [str(p) for p in _files() if p.suffix in texts and _text(p) is None]


# Written as patterns, so that this file does not hold what it looks for.
BANNED = {
    "a path of one machine": r"(?<![\w.:/~-])/(?:home|root|work|Users)/[\w.-]+",
    "a package registry's host": r"\b(?:pythonhosted|pypi|npmjs|crates)\.(?:org|com|io)\b"
    r"|\b(?:deb|ftp|packages|security|snapshot)\.debian\.org\b",
    "a merge left half-way": r"^(?:<{7}|>{7}) ",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a note to come back": r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b",
}


@pytest.mark.parametrize("what", BANNED)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(BANNED[what], re.MULTILINE)
    skipped = {".json", ".ipynb", ".lock"} if what == "a note to come back" else set()
    found = [
        f"{path}:{text[: hit.start()].count(chr(10)) + 1}: {hit.group()}"
        for path in _files()
        if path.suffix not in skipped and (text := _text(path))
        for hit in pattern.finditer(text)
    ]
    assert not found


PICKLERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve"}


def _hazards(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in _imports(tree):
        if name.split(".")[0] in PICKLERS:
            yield line, f"import {name}"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {word.arg: ast.unparse(word.value) for word in node.keywords}
        if called == "torch.load" and given.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        if called in ("eval", "exec", "os.system", "yaml.load", "tempfile.mktemp"):
            yield node.lineno, called
        for word in ("allow_pickle", "trust_remote_code", "shell"):
            if given.get(word, "False") != "False":
                yield node.lineno, f"{called}({word}={given[word]})"


def test_nothing_unpickles_or_runs_what_came_from_outside() -> None:
    found = [f"{p}:{line}: {what}" for p in _python(*SHIPPED) for line, what in _hazards(_tree(p))]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import pickle",
        "from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=flag)",
        "subprocess.run(text, shell=True)",
        "eval(text)",
    ],
)
def test_hazards_are_seen(source: str) -> None:
    assert list(_hazards(ast.parse(source)))


def test_apps_keep_the_two_sides_apart() -> None:
    # import-linter does not reach the apps: a coordinator's machine needs no training code,
    # a site's machine none of the server's
    sides = {
        "server_app.py": ("training", "site"),
        "client_app.py": ("strategies", "aggregation", "resilience"),
    }
    found = [
        f"{path}:{line}: {name}"
        for path in _python("apps")
        for line, name in _imports(_tree(path))
        if any(f"{name}.".startswith(f"flower_geo.{s}.") for s in sides.get(path.name, ()))
    ]
    assert not found


def test_every_library_is_a_declared_dependency() -> None:
    homes = {
        name: {canonicalize_name(one) for one in distributions}
        for name, distributions in importlib.metadata.packages_distributions().items()
    }
    project = PROJECT["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["align"]]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    known = sys.stdlib_module_names | {"flower_geo"}
    found = [
        f"{path}:{line}: {name}"
        for path in MODULES
        for line, name in _imports(_tree(path))
        if (top := name.split(".")[0]) not in known and not homes.get(top, set()) & declared
    ]
    assert not found


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    env = os.environ | {"PYTHONPATH": str(folder), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-P", "-c", program, "--no-cache"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("module", "breach"),
    [
        ("strategies/breach.py", "import flower_geo.training"),
        ("strategies/breach.py", "import flower_geo.site"),
        ("flower_geo/aggregation/breach.py", "import flower_geo.resilience"),
        ("flower_geo/observe/breach.py", "import flower_geo.resilience"),
        ("flower_geo/errors.py", "import flower_geo.config"),
        ("flower_geo/unplaced.py", ""),
    ],
)
def test_import_contract_catches(module: str, breach: str, tmp_path: Path) -> None:
    for path in [Path("pyproject.toml"), *_python("flower_geo", "strategies")]:
        home = tmp_path / ("flower_geo" if path.parts[0] == "strategies" else "") / path
        home.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, home)
    clean = _lint_imports(tmp_path)
    assert clean.returncode == 0, clean.stdout[-3000:] + clean.stderr[-1000:]
    home = tmp_path / ("flower_geo" if module.startswith("strategies") else "") / module
    with home.open("a", encoding="utf-8") as file:
        file.write(f"\n{breach}\n")
    broken = _lint_imports(tmp_path)
    assert broken.returncode == 1, broken.stdout[-3000:] + broken.stderr[-1000:]
    assert "BROKEN" in broken.stdout


def _locked() -> dict[str, str]:
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pin) == 2 for pin in pins), "the lock file holds name==version lines only"
    return {canonicalize_name(name): version for name, version in pins}


def test_lock_file_meets_the_ranges() -> None:
    project = PROJECT["project"]
    extras = [one for group in project["optional-dependencies"].values() for one in group]
    locked = _locked()
    for text in [*project["dependencies"], *extras]:
        wanted = Requirement(text)
        version = locked.get(canonicalize_name(wanted.name))
        assert version is not None, f"{wanted.name} is not in the lock file: run `make lock`"
        assert version in wanted.specifier, f"{text} does not allow the locked {version}"
    assert all("+" not in version for version in locked.values()), "a build's own suffix is locked"
    assert {"ray", "trl", "torch"} <= set(locked)


def test_one_way_to_install() -> None:
    others = {"uv.lock", "poetry.lock", "Pipfile", "Pipfile.lock", "setup.py", "setup.cfg"}
    assert not [str(p) for p in _files() if p.name in others]
    assert not {"uv", "poetry", "pdm", "hatch"} & set(PROJECT["tool"])


def test_changelog_knows_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+(?:\.?(?:dev|rc)\d+)?", flower_geo.__version__)
    assert "## [Unreleased]" in text or f"## [{flower_geo.__version__}]" in text


def test_every_environment_switch_is_read_when_called() -> None:
    # read at import, a switch can no longer be set by a program or a test
    def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield child
                yield from outside_functions(child)

    found = [
        f"{path}:{node.lineno}"
        for path in MODULES
        for node in outside_functions(_tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    ]
    assert not found
