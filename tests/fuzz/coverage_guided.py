"""`python -m tests.fuzz.coverage_guided`: atheris looks for bytes that reach new lines of the parsers of files.

Needs atheris (`pip install -e '.[fuzz]'`, Linux). Exit code 1 if a text ended in anything but a value or a QkeelError,
or took more than ten seconds; the text is then printed and kept in the file that atheris names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["qkeel.records", "tomllib"]):
    from qkeel.records import file_formats, parse, run_directory
from qkeel.errors import QkeelError


def _header(text: bytes, place: Path) -> object:
    return parse.parse_header(text, place, 8 + len(text) + 64)


def _json(text: bytes, place: Path) -> object:
    return parse.parse_json(text, str(place))


def _toml(text: bytes, place: Path) -> object:
    place.write_bytes(text)
    return parse.read_toml(place)


def _lines(text: bytes, place: Path) -> object:
    place.write_bytes(text)
    return list(file_formats.read_lines(place))


def _heads(text: bytes, place: Path) -> object:
    about, _, numbers = text.partition(b"\n")
    (place.parent / "heads.json").write_bytes(about)
    (place.parent / "heads.f32").write_bytes(numbers)
    return file_formats.read_heads(place.parent)


def _config(text: bytes, place: Path) -> object:
    (place.parent / "config.json").write_bytes(text)
    return run_directory.RunDirectory(place.parent).config()


# A parser, and texts to begin with.
PARSERS: dict[str, tuple[Callable[[bytes, Path], object], list[bytes]]] = {
    "json": (_json, [b'{"a": [1, -2.5e3, "\\u00e9", null, true]}']),
    "safetensors": (_header, [b'{"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}']),
    "toml": (_toml, [b'steps = 3\n[data]\nsource = "a"\nx = [1, 2.5, true]\n']),
    "lines": (_lines, [b'{"step": 0, "loss": "nan"}\n{"step": 1}\n']),
    "heads": (_heads, [b'{"fields": ["a"], "n_layers": 1, "n_heads": 2}\n' + bytes(24)]),
    "config": (_config, [b'{"kind": "watch", "sites": [{}], "model": "M"}', b'{"optim": {"lr": 0.1}, "seed": 0}']),
}
DICTIONARY = ["dtype", "shape", "data_offsets", "F32", "BF16", "__metadata__", "fields", "n_layers", "n_heads"]
DICTIONARY += ["nan", "1e999"]


def main() -> int:
    """Each parser in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.coverage_guided", description=__doc__)
    parser.add_argument("parsers", nargs="*", metavar="PARSER", help=f"of {', '.join(PARSERS)} [default: all]")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failed = []
    for name in options.parsers or PARSERS:
        command = [sys.executable, "-m", __spec__.name, name, f"-runs={options.cases}", f"-seed={options.seed}"]
        with tempfile.TemporaryDirectory(prefix="qkeel-fuzz-") as folder:
            place = Path(folder)
            (place / "words").write_text("".join(f'"{word}"\n' for word in DICTIONARY))
            corpus = place / "corpus"
            corpus.mkdir()
            for number, text in enumerate(PARSERS[name][1]):
                (corpus / str(number)).write_bytes(text)
            command += ["-timeout=10", "-rss_limit_mb=4096", "-max_len=512", f"-dict={place / 'words'}", str(corpus)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            last = [line for line in done.stderr.splitlines() if "cov:" in line][-1:]
            print(f"{name}: {'sound' if done.returncode == 0 else 'FAILED'}; {' '.join(last)[:120]}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stderr[-5000:])
    return 1 if failed else 0


def _guided(name: str) -> None:
    read = PARSERS[name][0]
    with tempfile.TemporaryDirectory(prefix="qkeel-fuzz-") as folder:
        place = Path(folder) / "case"

        def one(text: bytes) -> None:
            try:
                read(text, place)
            except QkeelError:
                return

        atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
        atheris.Fuzz()


if __name__ == "__main__":
    if any(word.startswith("-runs=") for word in sys.argv):
        _guided(sys.argv[1])
    sys.exit(main())
