"""Every figure in README is that of its source, its output is what its code prints, its picture is of this code."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from experiments.ladder.__main__ import measured
from experiments.ladder.plan import QUESTIONS, RUNGS
from experiments.ladder.rows import read, values
from tests import forked
from tests.docs.page_text import loaded

from qkeel.cli.app import main
from qkeel.lab import make_plan
from qkeel.lab.execute import study_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
IMAGES = ROOT / "docs" / "images" / "gallery"
PICTURE: dict[str, Any] = json.loads((IMAGES / "demo.json").read_text(encoding="utf-8"))


def said(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def found(page: str, pattern: str) -> tuple[str, ...]:
    match = re.search(pattern, said(page))
    assert match, f"{page} no longer has {pattern}"
    return match.groups()


def architectures() -> str:
    rows = re.findall(
        r"^\| (?!-|architecture|model\b|class\b)", (ROOT / "docs/internals/zoo.md").read_text(encoding="utf-8"), re.M
    )
    return str(len(rows))


def requires(pattern: str) -> tuple[str, ...]:
    match = re.search(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert match
    return match.groups()


RATIO = r"\| (?P<low>[\d.]+) / ([\d.]+) / ([\d.]+)"


def ratio(row: str) -> tuple[str, ...]:
    low, middle, high = found("docs/benchmarks.md", rf"\| {row} {RATIO}")
    return middle, low, high


def on_the_ladder(question: str) -> list[str]:
    """The means of a question over seeds, without their signs, one for each rung that has such runs."""
    (asked,) = (q for q in QUESTIONS if q.name == question)
    return [f"{abs(fmean(known.values())):.3f}" for rung in RUNGS if (known := values(asked, rung, read(rung)))]


def last_of(question: str) -> str:
    """The largest rung, in millions of parameters, whose rows answer a question."""
    (asked,) = (q for q in QUESTIONS if q.name == question)
    return [rung.removesuffix("M") for rung in RUNGS if values(asked, rung, read(rung))][-1]


def test_on_the_ladder_lalr_is_behind_qk_norm_everywhere_as_readme_says() -> None:
    assert "On average, LALR ends behind QK-norm at each of these rates" in README
    for asked in (q for q in QUESTIONS if (q.left, q.right) == ("lalr", "qk_norm") and q.role in ("tuned", "hot")):
        assert all(fmean(known.values()) > 0 for rung in RUNGS if (known := values(asked, rung, read(rung))))
    assert {row["lr"] for row in read("124M") if row["arm"] == "lalr"} == {RUNGS["124M"].roles["hot"]}


def test_on_the_largest_rung_the_differences_that_readme_names_are_within_the_noise_of_seeds() -> None:
    assert "and their differences are within the noise of seeds" in README
    named = ("qk_norm - none, tuned", "qk_norm - none, hot", "lalr - qk_norm, hot")
    for asked in (q for q in QUESTIONS if q.name in named):
        low, high = re.findall(r"([−+][\d.]+) to ([−+][\d.]+)", measured(asked, "124M")[0])[0]
        assert low[0] == "−"
        assert high[0] == "+"


SCRIPT, RETROFIT = "docs/tutorials/your-script.md", "docs/tutorials/retrofit.md"
LADDER = "docs/ladder.md"
H200 = "benchmarks/results/gpu-nvidia-h200-2026-11-27.md"
# What README says, by the words around its figures, and where each figure comes from.
FIGURES: tuple[tuple[str, Callable[[], tuple[str, ...]]], ...] = (
    (r"trains (\d+) tiny models", lambda: (str(len(make_plan("demo").runs)),)),
    (r"on (\d) idle cores", lambda: tuple(re.findall(r"^JOBS \?= (\d)", (ROOT / "Makefile").read_text(), re.M))),
    (r"Python ≥ ([\d.]+)", lambda: requires(r'requires-python = ">=([\d.]+)"')),
    (
        r"watching (\d) attention layers of GPT",
        lambda: found(SCRIPT, r"watching (\d) attention layers of GPT"),
    ),
    (
        r"alarm at step (14), blocks.0.attn, head 0: max logit (83.65) will pass 1,000 at step (43) "
        r"\(90 % interval (23) to (101)\)",
        lambda: found(
            SCRIPT,
            r"alarm at step (\d+), blocks.0.attn, head 0: max logit ([\d.]+) will pass 1,000 at step (\d+) "
            r"\(90 % interval (\d+) to (\d+)\)",
        ),
    ),
    (
        r"largest logit at step (\d+) drops from ([\d,]+) to ([\d,]+), "
        r"and the held-out loss at step (\d+) from ([\d.]+) to ([\d.]+)\.",
        lambda: (
            *found(SCRIPT, r"largest logit at step (\d+) \|"),
            *found(SCRIPT, r"\| `--lr 3e-2` \| [^|]+ \| ([\d,]+) \|"),
            *found(SCRIPT, r"with that `--apply` \| [^|]+ \| ([\d,]+) \|"),
            *found(SCRIPT, r"held-out loss at step (\d+) \|"),
            *found(SCRIPT, r"\| `--lr 3e-2` \|[^|]+\|[^|]+\|[^|]+\| ([\d.]+) \|"),
            *found(SCRIPT, r"with that `--apply` \|[^|]+\|[^|]+\|[^|]+\| ([\d.]+) \|"),
        ),
    ),
    (
        r"models of ([\d.]+), (\d+), (\d+) and (\d+) million parameters, QK-norm ends ([\d.]+), ([\d.]+), ([\d.]+) and "
        r"([\d.]+) nats ahead of no remedy at the tuned learning rate, and ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) "
        r"ahead at (8) to (10) times that rate, where attention without a remedy collapses in "
        r"(\d+) of (\d+), (\d+) of (\d+), (\d+) of (\d+) and (\d+) of (\d+) runs",
        lambda: (
            *(rung.removesuffix("M") for rung in RUNGS if read(rung)),
            *on_the_ladder("qk_norm - none, tuned"),
            *on_the_ladder("qk_norm - none, hot"),
            *found(LADDER, r"\*hot\* (8) to (10) times"),
            *found(LADDER, r"remedy at the hot rate" + 4 * r" \| (\d+) of (\d+) collapsed, 0 diverged"),
        ),
    ),
    (r"The (124)-million-parameter results are single runs of (200) steps", lambda: ("124", str(RUNGS["124M"].steps))),
    (
        r"at each of these rates \(at (124) million parameters, only the high one was tried\)",
        lambda: (last_of("lalr - qk_norm, hot"),),
    ),
    (
        r"(\d+) of (\d+) intervals of (90) % contain them",
        lambda: found(LADDER, r"(\d+) of (\d+) intervals of (90)% contain the measured value"),
    ),
    (
        r"naive insertion: KL ([\d.]+), loss \+([\d.]+) q, k balanced: KL ([\d.]+), loss \+([\d.]+)",
        lambda: (
            *found(RETROFIT, r"naive insertion: KL ([\d.]+), loss \+([\d.]+)"),
            *found(RETROFIT, r"q, k balanced: KL ([\d.]+), loss \+([\d.]+)"),
        ),
    ),
    (
        r"KL divergence is (\d+) times smaller",
        lambda: (
            str(
                round(
                    float(found(RETROFIT, r"naive insertion: KL ([\d.]+)")[0])
                    / float(found(RETROFIT, r"q, k balanced: KL ([\d.]+)")[0])
                )
            ),
        ),
    ),
    (
        r"Of (\d+) published claims: (\d+) reproduced, (\d+) contradicted, (\d+) undecided",
        lambda: found(
            "docs/what-we-found.md",
            r"Of (\d+) published claims: (\d+) reproduced, (\d+) contradicted, (\d+) undecided",
        ),
    ),
    (
        r"every tenth step \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
        lambda: ratio("full statistics at every 10th step, eager"),
    ),
    (
        r"largest logit at every step, in a model that calls `qkeel.attention` \| ([\d.]+) \(([\d.]+) to ([\d.]+)\)",
        lambda: ratio("training step, certified maximum at every step"),
    ),
    (
        r"\| ([\d.]+) and ([\d.]+) compiled, on two CPUs; ([\d.]+) with PyTorch's operations",
        lambda: (
            *found("docs/benchmarks.md", r"AdamW, fused \+ lalr, compiled C\+\+ \| \*\*([\d.]+)\*\*"),
            *found("docs/benchmarks.md", r"LALR ≤ 1.03 [^|]*\|[^|]*\*\*([\d.]+);"),
            *found("docs/benchmarks.md", r"AdamW, fused \+ lalr, torch's operations \| ([\d.]+)"),
        ),
    ),
    (
        r"steps on a CPU \| ([\d.]+) to ([\d.]+) times as long as with its SDPA",
        lambda: found("docs/guides/build-attention.md", r"steps on a CPU take ([\d.]+) to ([\d.]+) times as long"),
    ),
    (
        r"a training step of a 100-million-parameter model ([\d.]+) times as long",
        lambda: (f"{float(found(H200, r'everything, at every step . [0-9.]+ ms, ([0-9.]+)')[0]):.2f}",),
    ),
    (r"(\d+) architectures of transformers", lambda: (architectures(),)),
    (r"(\d+) other packages", lambda: found("docs/internals/foreign.md", r"targets of (\d+) packages")),
    (
        r"(\d+) of (\d+) attention layers identified correctly, the other (\d+)",
        lambda: (
            *found("docs/internals/foreign.md", r"attentions: (\d+) right"),
            *found("docs/internals/foreign.md", r"Their (\d+) attentions"),
            *found("docs/internals/foreign.md", r"attentions: \d+ right \([\d.]+ %\), (\d+) reported"),
        ),
    ),
    (r"Apache-([\d.]+)", lambda: requires(r'license = "Apache-([\d.]+)"')),
)
# Digits that are no figures: headings, names, orders of magnitude in a sentence that cites none.
NAMES = (r"## \d\.", r"FSDP\d", r"AVX2", r"H200", r"Qwen3", r"10³–10⁵", r"\[(\d+) other packages\]")


def prose() -> str:
    """README without code and targets of links."""
    text = re.sub(r"^```(?:python|sh)\n.*?^```|<!--.*?-->", "", README, flags=re.S | re.M)
    return " ".join(re.sub(r"<img[^>]*>|<source[^>]*>|\]\([^)]*\)", "", text).split())


@pytest.mark.parametrize(("pattern", "source"), FIGURES, ids=[pattern for pattern, _ in FIGURES])
def test_a_figure_is_that_of_its_source(pattern: str, source: Callable[[], tuple[str, ...]]) -> None:
    match = re.search(pattern, " ".join(README.split()))
    assert match, f"README no longer says {pattern}"
    assert match.groups() == source()


def test_every_figure_has_a_source() -> None:
    """What is left of README's digits without those that the table above accounts for."""
    text = prose()
    for pattern in (*(pattern for pattern, _ in FIGURES), *NAMES):
        text = re.sub(pattern, "", text)
    text = re.sub(r"`[^`]*`", "", re.sub(r"```text.*?```", "", text))
    assert not re.findall(r"[^ ]*\d[^ ]*", text), "figures without a source: add them to FIGURES"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


def test_the_code_prints_what_stands_below_it() -> None:
    code = blocks("python")[1]
    shown = blocks("text")[2]
    put_out = io.StringIO()
    with contextlib.redirect_stdout(put_out):
        exec(code, {})
    number = re.compile(r"\d+\.\d+|\d+")
    assert re.sub(r"\s+", " ", number.sub("#", put_out.getvalue())) == re.sub(r"\s+", " ", number.sub("#", shown))
    time = re.compile(r"\d+(\.\d+)? milliseconds")  # the machine decides it
    got, said = ([float(x) for x in number.findall(time.sub("", text))] for text in (put_out.getvalue(), shown))
    assert got == pytest.approx(said, rel=0.01)


def test_the_commands_of_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall(r"`(qkeel study lr [^`]+)`", README)
    tiny = (
        "--steps 2 --d-model 16 --n-layers 1 --n-heads 2 --head-dim 8 --context 8 --batch 2 --jobs 1 --eval-sequences 2"
    )
    assert main([*command.split()[1:], *tiny.split()]) == 0
    assert (tmp_path / "runs" / "lr" / "report.html").exists()
    (command,) = re.findall(r"^\$ (qkeel watch .+)$", blocks("text")[0], flags=re.M)
    words = [
        word.replace("examples/", f"{ROOT}/examples/") for word in command.replace("--steps 150", "--steps 2").split()
    ]
    small = ["--block-size", "16", "--n-layer", "4", "--n-head", "2", "--n-embd", "16", "--batch-size", "2"]
    words += [*small, "--eval-batches", "1"]
    done = forked.python(["-m", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "qkeel: watching 4 attention layers of GPT, run qkeel-runs/train_gpt" in done.stderr


def test_the_picture_is_of_the_study_as_it_is_defined() -> None:
    plan = make_plan("demo")
    about = study_of(plan, "")
    assert PICTURE["study"] == {
        **{name: about[name] for name in ("remedies", "lrs", "seeds", "primary")},
        "runs": len(about["runs"]),
    }, "the demo has changed: `make gallery` makes its picture again"
    for name, digest in PICTURE["sha256"].items():
        assert hashlib.sha256((IMAGES / name).read_bytes()).hexdigest() == digest, name


def test_the_first_page_of_the_docs_says_what_its_picture_shows() -> None:
    said = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (passed, near), *others = re.findall(r"largest attention logit passes ([\d,]+) within.*stays near (\d+)", said)
    assert others == [(passed, near)]  # light and dark
    assert PICTURE["drift"]["none"] > float(passed.replace(",", ""))
    assert round(PICTURE["drift"]["qk_norm"], -1) == float(near)


def test_the_text_of_the_picture_has_the_numbers_of_its_run_and_the_comparison_is_decided() -> None:
    (alt,) = re.findall(r'<img alt="([^"]*)" src="docs/images/gallery/demo-light.png">', README)
    assert alt == PICTURE["alt"] == loaded("make_gallery").alt(PICTURE)
    gain = PICTURE["gain"]
    assert 0 < gain["low"] < gain["mean"] < gain["high"]
    assert gain["seeds"] == len(PICTURE["study"]["seeds"])
    assert "nats better" in alt


# What the page of what was found says beside its claims, and where each figure comes from.
CLAIMS = "experiments/notes/claims.md"
FOUND: tuple[tuple[str, Callable[[], tuple[str, ...]]], ...] = (
    (r"for models of ([\d,]+) parameters", lambda: found(CLAIMS, r"micro: ([\d,]+) parameters")),
    (
        r"At a learning rate of ([\d.]+), eight times",
        lambda: found(CLAIMS, r"\*\*Read losses at LR ([\d.]+) with care"),
    ),
    (
        r"also ends ([\d.]+) nats ahead",
        lambda: found(
            "experiments/notes/claims.md", r"it ended ([\d.]+) nats \(0.085 to 0.173\) \*better\* than without a remedy"
        ),
    ),
    (r"a margin of ([\d.]+); over thirteen", lambda: found(CLAIMS, r"\| ([\d.]+) nats \| a run that")),
    # A test in tests/claims computes these from the tables of gains.
    (r"ranges from a cost of (0.023) to a gain of (0.081)", lambda: ("0.023", "0.081")),
    (
        r"gains (0.021), (0.043) and (0.055) nats at the tuned rate, and (0.43) to (0.65) at",
        lambda: (
            *on_the_ladder("qk_norm - none, tuned")[:3],
            *(f"{end(map(float, on_the_ladder('qk_norm - none, hot')[:3])):.2f}" for end in (min, max)),
        ),
    ),
    (
        r"124 million parameters \(one seed\), QK-norm gains (0.006) and (0.065)",
        lambda: tuple(on_the_ladder(f"qk_norm - none, {role}")[3] for role in ("tuned", "hot")),
    ),
)


@pytest.mark.parametrize(("pattern", "source"), FOUND, ids=[pattern for pattern, _ in FOUND])
def test_a_figure_of_what_was_found_is_that_of_its_source(pattern: str, source: Callable[[], tuple[str, ...]]) -> None:
    assert found("docs/what-we-found.md", pattern) == source()


def test_the_tables_of_what_was_found_are_those_of_the_studies_pages() -> None:
    page = (ROOT / "docs/what-we-found.md").read_text(encoding="utf-8")
    sections = [part for part in page.split("\n## ") if "[Details](../" in part or "[details](../" in part]
    assert len(sections) >= 7
    for part in sections:
        (source,) = re.findall(r"\[[Dd]etails\]\(\.\./(experiments/notes/[\w-]+\.md)\)", part)
        known = set(re.findall(r"[\d.,]*\d", (ROOT / source).read_text(encoding="utf-8")))
        rows = [line.partition(" | ")[2] for line in part.splitlines() if line.startswith("|") and "---" not in line][
            1:
        ]
        for number in re.findall(r"(?<![\w.])[\d.,]*\d(?![\w−])", " ".join(rows)):
            assert number in known, f"{part.splitlines()[0]}: {number} is not in {source}"


def test_what_the_page_of_the_autopilot_says_of_the_ladder_is_on_the_ladder() -> None:
    above, hot, tuned = (
        on_the_ladder(f"autopilot - {other}") for other in ("qk_norm, above", "qk_norm, hot", "none, tuned")
    )
    page = "docs/guides/autopilot.md"
    figures = found(
        page,
        r"by ([\d.]+) nats at [\d.]+ times the\s+tuned rate and by ([\d.]+) at [^)]+\), by ([\d.]+) and ([\d.]+) at "
        r"[^)]+\), and by ([\d.]+)\s+and ([\d.]+) at",
    )
    assert figures == (above[0], hot[0], above[1], hot[1], above[2], hot[2])
    assert found(page, r"it is ([\d.]+) ahead at 10\s+times, also undecided") == (hot[3],)
    assert found(page, r"it is ([\d.]+), ([\d.]+) and ([\d.]+) ahead of no remedy") == (*tuned[:3],)
    (asked,) = (q for q in QUESTIONS if q.name == "autopilot - qk_norm, hot")
    assert [fmean(values(asked, rung, read(rung)).values()) > 0 for rung in RUNGS] == [True, True, True, False]
