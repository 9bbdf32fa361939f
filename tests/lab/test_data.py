"""Text: where it comes from, how it is split, and one clear error each for what does not fit."""

from pathlib import Path

import numpy as np
import pytest

from qkeel.errors import DataError, QkeelError
from qkeel.lab.config import DataConfig
from qkeel.lab.text import batch, heldout, load, split


def text(n, seed=0):
    return np.random.default_rng(seed).integers(97, 123, n).astype(np.uint8).tobytes()


def data(path, **options):
    return DataConfig(source=str(path), **{"context": 8, "batch": 2, **options})


def size(source):
    corpus = load(data(source))
    return len(corpus.train) + len(corpus.heldout)


def test_batches_are_a_function_of_seed_and_step():
    config = DataConfig(source="topics")
    corpus = load(config)
    first = [batch(corpus, config, 3, step) for step in range(4)]
    again = [batch(corpus, config, 3, step) for step in (3, 1)]
    assert (again[0] == first[3]).all()
    assert (again[1] == first[1]).all()
    assert (first[0] != first[1]).any()
    assert (batch(corpus, config, 4, 0) != first[0]).any()
    assert (first[0].shape, first[0].dtype) == ((8, 33), np.int64)


def test_heldout_windows_are_fixed_and_spread_over_the_heldout_part():
    corpus = load(DataConfig(source="topics"))
    windows, whole = heldout(corpus, 32, 16), corpus.heldout.tobytes()
    assert (windows == heldout(corpus, 32, 16)).all()
    places = [whole.index(bytes(w.astype(np.uint8))) / len(whole) for w in windows]
    assert max(np.diff(sorted([0, *places, 1]))) < 0.2


def test_files_are_held_out_whole_by_the_hash_of_their_content():
    texts = [text(1000 + 10 * i, seed=i) for i in range(50)]
    train, held = split(texts)
    assert sorted(train + held) == sorted(texts)
    assert 0.05 < sum(map(len, held)) / sum(map(len, texts)) <= 0.1
    # Neither the order of files nor copies of them decide.
    train, again = split([*texts[::-1], *texts])
    assert set(again) == set(held)
    assert len(train) + len(again) == 50
    assert not set(train) & set(held)
    whole = text(1000)
    assert split([whole]) == ([whole[:900]], [whole[900:]])


def test_the_stdlib_is_text_without_tests_and_is_loaded_once():
    corpus = load(DataConfig())
    assert (corpus.vocab_size, corpus.loss_unit) == (256, "byte")
    assert len(corpus.train) > 5_000_000
    assert 0.05 < len(corpus.heldout) / len(corpus.train) < 0.12
    assert load(DataConfig(context=64)) is corpus


def test_files_and_folders_are_read_again_when_a_file_changes_or_is_added(
    tmp_path,
):
    for i in range(12):
        (tmp_path / f"f{i}.txt").write_bytes(text(200, seed=i))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "g.md").write_bytes(text(200, seed=99))
    (tmp_path / "image.png").write_bytes(b"\0" * 50)
    assert size(tmp_path) == 13 * 200
    assert size(tmp_path / "f3.txt") == 200
    before = load(data(tmp_path))
    assert load(data(tmp_path)) is before
    (tmp_path / "f0.txt").write_bytes(text(600, seed=7))
    changed = load(data(tmp_path))
    assert changed.sha256 != before.sha256
    (tmp_path / "new.txt").write_bytes(text(500, seed=3))
    assert load(data(tmp_path)).sha256 != changed.sha256


def test_token_files_are_train_and_val_or_one_that_is_cut(tmp_path):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    np.arange(50, dtype="<u2").tofile(tmp_path / "val.bin")
    for source in (tmp_path, tmp_path / "train.bin"):
        corpus = load(data(source))
        assert (len(corpus.train), len(corpus.heldout)) == (100, 50)
        assert (corpus.vocab_size, corpus.loss_unit) == (100, "token")
    assert load(data(tmp_path, vocab_size=500)).vocab_size == 500
    np.arange(200, dtype="<u2").tofile(tmp_path / "alone.bin")
    corpus = load(data(tmp_path / "alone.bin"))
    assert corpus.train.tolist() == list(range(180))
    assert (len(corpus.heldout), corpus.vocab_size) == (20, 200)


def write(path, content):
    path.write_bytes(content)
    return path


WORDS = np.full(100, 300, dtype="<u2").tobytes()
BAD = {
    "is empty": lambda p: data(write(p / "a.txt", b"")),
    "more than the context, 32": lambda p: data(
        write(p / "a.txt", b"short"), context=32
    ),
    "multiple of 2": lambda p: data(write(p / "odd.bin", b"123")),
    "has token 300; expected .* below the vocabulary size, 300": lambda p: data(
        write(p / "a.bin", WORDS), vocab_size=300
    ),
    "below the vocabulary size, 100": lambda p: data(
        write(p / "a.txt", b"short text"), vocab_size=100
    ),
    "NUL bytes": lambda p: data(write(p / "a.txt", b"a\0b")),
    "contains no text file": lambda p: data(p),
    "no such file": lambda p: data(p / "missing.txt"),
    "cannot read": lambda p: data(p / "missing.bin"),
    "Did you mean 'stdlib'": lambda p: data("stdlb"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_corpora_get_one_clear_error(words, tmp_path):
    with pytest.raises(QkeelError, match=words):
        load(BAD[words](tmp_path))


def test_an_unreadable_file_is_a_data_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path / "secret.txt", text(500))
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*secret.txt: Permission denied"):
        load(data(path))
