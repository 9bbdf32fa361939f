from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkeel.errors import DataError
from qkeel.lab.config import DataConfig
from qkeel.lab.text import batch, heldout, load, split


def text(n: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(97, 123, n).astype(np.uint8).tobytes()


def data(path: Path | str, **options: Any) -> DataConfig:
    return DataConfig(source=str(path), **{"context": 8, "batch": 2, **options})


def test_batches_are_a_function_of_seed_and_step() -> None:
    config = DataConfig(source="topics")
    corpus = load(config)
    first = [batch(corpus, config, 3, step) for step in range(4)]
    again = [batch(corpus, config, 3, step) for step in (3, 1)]
    assert (again[0] == first[3]).all()
    assert (again[1] == first[1]).all()
    assert (first[0] != first[1]).any()
    assert (batch(corpus, config, 4, 0) != first[0]).any()
    assert first[0].shape == (8, 33)
    assert first[0].dtype == np.int64


def test_heldout_windows_are_fixed_and_spread_over_the_heldout_part() -> None:
    corpus = load(DataConfig(source="topics"))
    windows = heldout(corpus, 32, 16)
    assert (windows == heldout(corpus, 32, 16)).all()
    whole = corpus.heldout.tobytes()
    places = [whole.index(bytes(w.astype(np.uint8))) / len(whole) for w in windows]
    assert max(np.diff(sorted([0, *places, 1]))) < 0.2


def test_files_are_held_out_whole_by_the_hash_of_their_content() -> None:
    texts = [text(1000 + 10 * i, seed=i) for i in range(50)]
    train, held = split(texts)
    assert sorted(train + held) == sorted(texts)
    assert 0.05 < sum(map(len, held)) / sum(map(len, texts)) <= 0.1
    shuffled = split(texts[::-1])
    assert set(shuffled[1]) == set(held), "the order of the files decides"


def test_copies_of_a_file_stand_on_one_side_only() -> None:
    texts = [text(1000, seed=i) for i in range(30)]
    train, held = split([*texts, *texts])
    assert len(train) + len(held) == 30
    assert not set(train) & set(held)


def test_a_single_file_gives_its_last_tenth() -> None:
    whole = text(1000)
    assert split([whole]) == ([whole[:900]], [whole[900:]])


def test_the_stdlib_is_text_without_tests_and_is_loaded_once() -> None:
    corpus = load(DataConfig())
    assert corpus.vocab_size == 256
    assert corpus.loss_unit == "byte"
    assert len(corpus.train) > 5_000_000
    assert 0.05 < len(corpus.heldout) / len(corpus.train) < 0.12
    assert load(DataConfig(context=64)) is corpus
    assert b"site-packages/" not in corpus.name.encode()


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text(500))
    before = load(data(path))
    path.write_bytes(text(600, seed=1))
    after = load(data(path))
    assert before.sha256 != after.sha256
    assert len(after.train) == 540


def test_files_that_match_a_pattern_are_read_again_when_one_changes_or_is_added(
    tmp_path: Path,
) -> None:
    for i in range(3):
        (tmp_path / f"{i}.txt").write_bytes(text(500, seed=i))
    pattern = data(tmp_path / "*.txt")
    before = load(pattern)
    assert load(pattern) is before
    (tmp_path / "notes.md").write_bytes(text(500, seed=8))
    assert load(pattern) is before, "the pattern does not match this file"
    (tmp_path / "0.txt").write_bytes(text(600, seed=7))
    changed = load(pattern)
    assert changed.sha256 != before.sha256
    (tmp_path / "3.txt").write_bytes(text(500, seed=3))
    assert load(pattern).sha256 != changed.sha256


def test_folders_globs_and_files_are_read(tmp_path: Path) -> None:
    for i in range(12):
        (tmp_path / f"f{i}.txt").write_bytes(text(200, seed=i))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g.md").write_bytes(text(200, seed=99))
    (tmp_path / "image.png").write_bytes(b"\0" * 50)

    def size(source: Path | str) -> int:
        corpus = load(data(source))
        return len(corpus.train) + len(corpus.heldout)

    assert size(tmp_path) == 13 * 200
    assert size(tmp_path / "*.txt") == 12 * 200
    assert size(tmp_path / "f1*.txt") == 3 * 200
    assert size(tmp_path / "f3.txt") == 200


def test_two_files_of_tokens_are_train_and_val(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    for source in (tmp_path, tmp_path / "train.bin"):
        corpus = load(data(source))
        assert (len(corpus.train), len(corpus.heldout), corpus.vocab_size) == (
            100,
            50,
            100,
        )
        assert corpus.loss_unit == "token"
    assert load(data(tmp_path, vocab_size=500)).vocab_size == 500


def test_a_single_token_file_is_cut(tmp_path: Path) -> None:
    np.arange(200, dtype="<u2").tofile(tmp_path / "words.bin")
    corpus = load(data(tmp_path / "words.bin"))
    assert (len(corpus.train), len(corpus.heldout)) == (180, 20)


def refused(config: DataConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(config)


def test_bad_corpora_get_one_clear_error(tmp_path: Path) -> None:
    empty, short, odd, words = (
        tmp_path / n for n in ("empty.txt", "short.txt", "odd.bin", "words.bin")
    )
    empty.write_bytes(b"")
    short.write_bytes(b"short text")
    odd.write_bytes(b"123")
    np.full(100, 300, dtype="<u2").tofile(words)
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "none").mkdir()
    refused(data(empty), "is empty")
    refused(data(short, context=32), "expected more than the context, 32")
    refused(data(odd), "positive multiple of 2")
    refused(
        data(words, vocab_size=300),
        "has token 300; expected tokens below the vocabulary size, 300",
    )
    refused(
        data(short, vocab_size=100), "expected tokens below the vocabulary size, 100"
    )
    refused(data(tmp_path / "nul.txt"), "NUL bytes")
    refused(data(tmp_path / "none"), "contains no text file")
    refused(data(tmp_path / "missing.txt"), "no such file")
    refused(data(tmp_path / "missing.bin"), "cannot read")
    refused(data("stdlb"), "Did you mean 'stdlib'")


def test_an_unreadable_file_is_a_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.txt"
    path.write_bytes(text(500))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    refused(data(path), "cannot read .*secret.txt: Permission denied")
