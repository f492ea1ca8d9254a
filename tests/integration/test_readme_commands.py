"""Every command of README.md is run, word by word, as a reader would run it.

Only what a test must not touch is put elsewhere: ports, ``/data``, ``/var``
and the home folder.  The app is the repository's with smaller defaults, so that
the commands stay as they are and take seconds.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_geo.launch import processes
from flower_geo.launch.environment import child_environment
from flower_geo.observe import read_metrics
from flower_geo.resilience import Journal

REPO = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```(bash|toml|python)\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
#: The adapter's own model comes from the first app: both train on as many tokens.
SMALL = {
    "model": '"gpt2-pico"', "seq-len": "64", "batch-size": "4", "inner-steps": "4",
    "warmup-steps": "2", "eval-tokens": "256", "sample-tokens": "8",
}  # fmt: skip

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


class Reader:
    """Someone who types what the README says.

    Attributes:
        folder: where they stand; also their home.
        done: lines typed so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: set[str] = set()
        self.mark = processes.new_mark()
        self.members: list[processes.ProcessRef] = []
        port, runtime = processes.free_ports(2)
        self.elsewhere = {
            "--superlink 127.0.0.1:8000": f"--superlink 127.0.0.1:{port} --port {runtime}",
            "--port 8000": f"--port {port}",
            "127.0.0.1:8000": f"127.0.0.1:{port}",
            "/data/text": str(folder / "data" / "text"),
            "/var/lib/flower-geo": str(folder / "var"),
        }
        dropped = ("FLWR_", "XDG_", "FLOWER_GEO_", "VIRTUAL_ENV")
        env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        env.update(HOME=str(folder), OMP_NUM_THREADS="1", FLWR_TELEMETRY_ENABLED="0")
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
        env[processes.MARK] = self.mark
        self.env = env

    def _put(self, line: str) -> str:
        """The line with what must lie elsewhere changed, the longest forms first."""
        self.done.add(line)
        written = "|".join(map(re.escape, sorted(self.elsewhere, key=len, reverse=True)))
        return re.sub(written, lambda found: self.elsewhere[found[0]], line)

    def types(self, line: str, code: int = 0) -> str:
        """Run a line to its end; return what it printed."""
        ran = subprocess.run(
            ["bash", "-c", self._put(line)], cwd=self.folder, env=self.env, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400,
        )  # fmt: skip
        assert ran.returncode == code, f"{line}\n{ran.stdout}"
        return ran.stdout

    def leaves_running(self, line: str, log: str) -> Path:
        """Start a line in a terminal of its own."""
        path = self.folder / log
        env = child_environment({**self.env, processes.MARK: self.mark})
        self.members.append(
            processes.start(
                ["/bin/bash", "-c", f"exec {self._put(line)}"], env=env, log=path, cwd=self.folder
            )
        )
        return path

    def leave(self) -> None:
        """End all they started."""
        processes.stop(self.members, self.mark)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(
        REPO / "apps", folder / "apps", ignore=shutil.ignore_patterns("__pycache__", ".flwr*")
    )
    for app in ("diloco", "fedavg_lora", "split"):
        project = folder / "apps" / app / "pyproject.toml"
        text = project.read_text()
        for key, value in SMALL.items():
            if (app, key) == ("split", "model"):
                continue  # to be cut in three, it has more layers
            text, changed = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
            assert changed == 1, key
        project.write_text(text)
    (folder / "data" / "text").mkdir(parents=True)
    with lzma.open(REPO / "flower_geo" / "data" / "corpora" / "austen.txt.xz", "rt") as file:
        (folder / "data" / "text" / "novels.txt").write_text(file.read()[:200_000])
    someone = Reader(folder)
    try:
        yield someone
    finally:
        someone.leave()


def lines_with(*words: str) -> str:
    """The one line of the README's blocks that holds all the words."""
    found = [line for line in every_line() if all(word in line for word in words)]
    assert len(found) == 1, (words, found)
    return found[0]


def every_line() -> list[str]:
    lines = [line.split("  #")[0].rstrip() for kind, block in BLOCKS if kind == "bash"
             for line in block.splitlines()]  # fmt: skip
    return [line for line in lines if line]


def committed(folder: Path) -> list[int]:
    entries = Journal(folder / "journal.jsonl").entries()
    return [entry["round"] for entry in entries if entry["what"] == "commit"]


def wait_for_text(path: Path, words: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and words in path.read_text(errors="replace"):
            return
        time.sleep(0.1)
    raise AssertionError(f"no {words!r} in {path}:\n{path.read_text() if path.exists() else ''}")


def test_the_same_on_real_processes(reader: Reader) -> None:
    reader.types(lines_with("cluster up"))
    try:
        shown = reader.types(lines_with("flower-geo run", "geo --run-config"))
    finally:
        reader.types(lines_with("cluster down"))
    assert "report.html" in shown
    assert committed(reader.folder / "runs" / "first") == [1, 2, 3]


def test_the_model_is_an_ordinary_folder(reader: Reader) -> None:
    shown = python(reader, "AutoTokenizer", "print(type(model).__name__, len(tokenizer))")
    assert shown.split()[-2:] == ["GPT2LMHeadModel", "4096"], shown


def python(reader: Reader, word: str, then: str) -> str:
    """Run the README's Python block that holds ``word``, with a line after it."""
    (code,) = [block for kind, block in BLOCKS if kind == "python" and word in block]
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\n{then}\n"], cwd=reader.folder, env=reader.env,
        check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_own_model_doctor_and_report(reader: Reader) -> None:
    shutil.copytree(reader.folder / "runs" / "first" / "model", reader.folder / "my-model")
    line = lines_with("flower-geo doctor")
    ran = subprocess.run(
        ["bash", "-c", line], cwd=reader.folder, env=reader.env, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    reader.done.add(line)
    # 1 says that this machine is too small for the model, with a remedy.
    assert ran.returncode in (0, 1) and "gpt2-medium" in ran.stdout, ran.stdout + ran.stderr
    reader.types(lines_with("apps/diloco", 'model="my-model"'))
    assert committed(reader.folder / "runs" / "mine") == [1, 2]
    shown = reader.types(lines_with("flower-geo report"))
    assert (reader.folder / shown.strip()).is_file()
    assert "inner-lr" in reader.types("flower-geo config")
    assert "topk(density=0.03" in reader.types(lines_with("flower-geo codec"))


def test_an_adapter_on_an_own_model_and_own_answers(reader: Reader) -> None:
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(60)]
    (reader.folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = reader.types(lines_with("apps/fedavg_lora", "--sites 4"))
    assert "What is AI?" in shown and committed(reader.folder / "runs" / "tuned") == [1, 2]
    reader.types(lines_with("apps/fedavg_lora", 'model="my-model"'))
    assert committed(reader.folder / "runs" / "adapter") == [1, 2]
    shown = python(reader, "PeftModel", "print(type(tuned).__name__, tuned.active_adapter)")
    assert shown.split()[-2:] == ["PeftModelForCausalLM", "default"], shown


def test_a_model_cut_in_two(reader: Reader) -> None:
    shown = reader.types(lines_with("apps/split", "--sites 2"))
    assert "2 sites" in shown and committed(reader.folder / "runs" / "split") == [*range(1, 11)]
    assert (reader.folder / "runs" / "split" / "model" / "adapter_model.safetensors").exists()


def test_a_coordinator_and_an_institution(reader: Reader) -> None:
    for line in every_line():
        if line.startswith("export "):
            name, value = line.removeprefix("export ").split("=")
            reader.env[name] = value
            reader.done.add(line)
    (connection,) = [block for kind, block in BLOCKS if kind == "toml"]
    (reader.folder / ".flwr").mkdir(exist_ok=True)
    with (reader.folder / ".flwr" / "config.toml").open("a") as file:
        file.write(reader._put(connection))
    superlink = reader.leaves_running(lines_with("flower-superlink"), "superlink.log")
    wait_for_text(superlink, "Uvicorn running")
    supernode = reader.leaves_running(lines_with("flower-supernode"), "supernode.log")
    wait_for_text(supernode, "SuperNode ID")
    reader.types(lines_with("flower-geo run", "cloud"))
    assert committed(reader.folder / "runs" / "pilot") == [1, 2, 3]
    reader.types(lines_with("flwr run", "cloud"))
    assert committed(reader.folder / "runs" / "pilot") == [1, 2, 3, 4]
    events = read_metrics(reader.folder / "runs" / "pilot" / "metrics.jsonl")
    assert {e["site"] for e in events if e["event"] == "site"} == {"uni-a"}
    assert (reader.folder / "var").is_dir()


def test_no_command_was_left_out(reader: Reader) -> None:
    """Those that remain are run by CI itself, or are this interpreter's environment."""
    left = set(every_line()) - reader.done
    assert left == {"make demo", "make test", ". .venv/bin/activate"}
