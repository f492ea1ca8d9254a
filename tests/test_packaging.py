"""What an sdist, a wheel and an editable install hold, and what they must not leak."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
SKIPPED = {"build", "dist", "runs", "artefacts", "__pycache__"}

# Imports each package named on the command line and tells where it came from.
PROBE = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""

# Imports the strategies and reads a resource, as a user's program would.
USE = """
import importlib.resources, json
import flower_geo, flower_geo.strategies
typed = importlib.resources.files("flower_geo").joinpath("py.typed").is_file()
print(json.dumps([flower_geo.__version__, flower_geo.strategies.__file__, typed]))
"""


def _clean_env() -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    return env | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=_clean_env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _tree() -> list[PurePosixPath]:
    """Files of the checkout (committed or not, ignored ones left out), as git lists them."""
    if (ROOT / ".git").exists():
        listed = _run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).split("\0")
        names = [PurePosixPath(name) for name in listed if name]
        return [name for name in names if os.path.lexists(ROOT / name)]
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if not path.is_dir())
    return [PurePosixPath(p) for p in found if not (SKIPPED & set(p.parts) or _hidden(p))]


def _in_package() -> set[str]:
    """Names that the tree's package files have once they are installed."""
    names = {str(p) for p in _tree() if p.parts[0] == "flower_geo"} - {"flower_geo/strategies"}
    return names | {f"flower_geo/{p}" for p in _tree() if p.parts[0] == "strategies"}


def _environment(folder: Path) -> tuple[Path, Path]:
    """A new environment that sees this one's libraries, but not its flower_geo.

    A .pth file adds this interpreter's site-packages to the path.  The .pth files *there*
    are not followed, so an editable install of this checkout stays out of sight.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(_run(python, "-c", where, cwd=folder).strip())
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    return python, site


def _install(python: Path, *arguments: str | Path, cwd: Path) -> None:
    command = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps")
    _run(*command, "--no-compile", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree without anything git ignores, links kept."""
    target = tmp_path_factory.mktemp("copy") / "flower-geo"
    for name in _tree():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="module")
def built(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist of the copy, and a wheel that was built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    log = _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=copy)
    assert "is absent from the `packages` configuration" not in log
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def test_package_list_equals_the_tree() -> None:
    # the two folders are walked apart: through the link each strategy would count twice
    found = set()
    for top, prefix in (("flower_geo", "flower_geo"), ("strategies", "flower_geo.strategies")):
        for folder, inner, files in os.walk(ROOT / top, followlinks=False):
            inner[:] = [name for name in inner if name not in SKIPPED]
            if "__init__.py" in files:
                parts = Path(folder).relative_to(ROOT / top).parts
                found.add(".".join((prefix, *parts)))
    assert len(PACKAGES) == len(set(PACKAGES))
    assert set(PACKAGES) == found, "bring tool.setuptools.packages in pyproject.toml in step"


def test_every_folder_with_modules_is_a_package() -> None:
    bare = {
        str(name.parent)
        for name in _tree()
        if name.suffix == ".py"
        and name.parts[0] in ("flower_geo", "strategies")
        and not (ROOT / name.parent / "__init__.py").exists()
    }
    assert not bare, f"without __init__.py these modules are not packaged: {sorted(bare)}"


def test_link_and_folder_are_the_same_place() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("an sdist holds no link")
    link = ROOT / "flower_geo" / "strategies"
    assert link.samefile(ROOT / "strategies")
    listed = _run("git", "ls-files", "-s", "flower_geo/strategies", cwd=ROOT)
    assert listed.startswith("120000 "), "flower_geo/strategies must be a link in git"
    assert os.readlink(link) == "../strategies"


def test_no_init_in_folders_that_are_not_packages() -> None:
    assert not [n for n in _tree() if n.parts[0] in ("apps", "proto") and n.name == "__init__.py"]


def test_sdist_holds_the_sources(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("apps", "docs", "examples", "proto", "requirements", "strategies", "tests", "tools")
    wanted = {str(n) for n in _tree() if n.parts[0] in folders and n.name != ".gitignore"}
    wanted |= {"LICENSE", "Makefile", "CHANGELOG.md", "pyproject.toml"}
    assert not wanted - names


def test_wheel_holds_exactly_the_package(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == _in_package()
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_installed_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    python, site = _environment(tmp_path / "env")
    before = {path.name for path in site.iterdir()}
    _install(python, built[1], cwd=tmp_path)
    added = {path.name for path in site.iterdir()} - before
    (info,) = site.glob("flower_geo-*.dist-info")
    assert added == {"flower_geo", info.name}
    assert (python.parent / "flower-geo").is_file()

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    origins = json.loads(_run(python, "-P", "-c", PROBE, *PACKAGES, cwd=elsewhere))
    assert set(origins) == set(PACKAGES)
    assert all(Path(origin).is_relative_to(site) for origin in origins.values()), origins


def test_installed_wheel_beside_the_checkout(built: tuple[Path, Path], tmp_path: Path) -> None:
    # in the root the folder in sight wins over the installed one; the link supplies strategies
    if not (ROOT / "flower_geo" / "strategies").exists():
        pytest.skip("an sdist holds no link")
    python, _ = _environment(tmp_path / "env")
    _install(python, built[1], cwd=tmp_path)
    _, origin, typed = json.loads(_run(python, "-B", "-c", USE, cwd=ROOT))
    assert typed
    assert Path(origin).samefile(ROOT / "strategies" / "__init__.py")


def test_editable_install(copy: Path, tmp_path: Path) -> None:
    python, site = _environment(tmp_path / "env")
    before = {path.name for path in site.iterdir()}
    _install(python, "--no-build-isolation", "-e", copy, cwd=tmp_path)
    added = {path.name for path in site.iterdir()} - before
    assert all("flower_geo" in name for name in added), added
    for cwd in (tmp_path, copy):
        version, origin, typed = json.loads(_run(python, "-B", "-c", USE, cwd=cwd))
        assert typed
        assert f"flower_geo-{version}.dist-info" in added
        assert Path(origin).samefile(copy / "strategies" / "__init__.py")
