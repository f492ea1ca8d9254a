from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.data import load_tokenizer, tokenizer_hash
from flower_geo.data.tokenizer import encoder, end_of_text
from flower_geo.errors import DataError, ModelError

HASH = "22080d6b757e1c2452fb28dcb994f73f5a8863a583fa5433b2a962a85b372b00"


def test_the_shipped_one_has_4096_tokens_and_one_special(tokenizer: Any) -> None:
    assert len(tokenizer) == 4096
    assert tokenizer.all_special_tokens == ["<|endoftext|>"]
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>") == 0
    assert tokenizer.encode("<|endoftext|>") == [0]


def test_any_text_comes_back(tokenizer: Any) -> None:
    encode = encoder(tokenizer)

    @given(text=st.text(st.characters(codec="utf-8"), max_size=60))
    def check(text: str) -> None:
        (ids,) = encode([text])
        assert tokenizer.decode(ids) == text
        assert 0 not in ids

    check()


def test_text_cannot_end_a_document_from_within(tokenizer: Any) -> None:
    (ids,) = encoder(tokenizer)(["a <|endoftext|> b"])
    assert end_of_text(tokenizer) not in ids
    assert tokenizer.decode(ids) == "a <|endoftext|> b"
    assert tokenizer.encode("<|endoftext|>") == [0], "the caller's own settings changed"


def test_the_hash_is_stable_and_sees_what_decides_ids(tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer_hash(tokenizer) == HASH
    tokenizer.save_pretrained(tmp_path / "copy")
    copy = load_tokenizer(str(tmp_path / "copy"))
    assert tokenizer_hash(copy) == HASH
    copy(["one", "two three"], truncation=True, max_length=2, padding=True)
    assert tokenizer_hash(copy) == HASH, "a call left a trace"
    copy.add_tokens(["<extra>"])
    assert tokenizer_hash(copy) != HASH


def test_the_hash_sees_another_order_of_merges(tmp_path: Path) -> None:
    shipped = resources.files("flower_geo.data") / "tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((shipped / name).read_text("utf-8"), "utf-8")
    data = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    merges = data["model"]["merges"]
    merges[100], merges[101] = merges[101], merges[100]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), "utf-8")
    assert tokenizer_hash(load_tokenizer(str(tmp_path))) != HASH


@pytest.mark.parametrize(
    "fault", ["empty folder", "damaged", "a file", "no such folder", "no such name"]
)
def test_what_cannot_be_loaded_is_one_line(fault: str, tmp_path: Path) -> None:
    spec = tmp_path / "tok"
    if fault in ("empty folder", "damaged"):
        spec.mkdir()
    if fault == "damaged":
        (spec / "tokenizer.json").write_text("{", "utf-8")
        (spec / "tokenizer_config.json").write_text("{}", "utf-8")
    if fault == "a file":
        spec.write_text("x", "utf-8")
    name = "nobody/nothing-of-the-kind" if fault == "no such name" else str(spec)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(name)
    assert "builtin" in str(caught.value) and "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_tokenizer_without_an_end_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text("utf-8"))
    for key in ("eos_token", "bos_token", "pad_token"):
        config.pop(key, None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ModelError, match="no end-of-text token: set eos_token"):
        load_tokenizer(str(tmp_path))

    class Endless:
        eos_token_id = None

    with pytest.raises(DataError, match=r"tokenizer\.eos_token"):
        end_of_text(Endless())  # type: ignore[arg-type]


def test_a_tokenizer_without_a_backend_is_served(tokenizer: Any) -> None:
    class Plain:
        eos_token_id = 0

        def get_vocab(self) -> dict[str, int]:
            return {"a": 1, "b": 2}

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [1 if letter == "a" else 2 for letter in text]

    plain: Any = Plain()
    assert encoder(plain)(["ab", "b"]) == [[1, 2], [2]]
    assert tokenizer_hash(plain) == tokenizer_hash(plain) != tokenizer_hash(tokenizer)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, flower_geo.data; heavy = {'torch', 'transformers', 'tokenizers', 'datasets',"
        " 'pyarrow', 'pandas'} & set(sys.modules); sys.exit(', '.join(heavy) or 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
