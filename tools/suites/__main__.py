"""`python -m tools.suites`: runs peers' own tests, and writes the table of outcomes.

--only replaces these parts of the page. --kept FOLDER keeps the outcomes of transformers' tests there: a call whose
time is over, or that names other families, leaves them to the next call, which runs the tests that are left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "gpt2", "bert", "t5", "gemma2", "qwen3", "vit")
MODES = {
    "qkeel": '`attn_implementation="qkeel"` in the place of "sdpa"',
    "watched": "every model watched, all statistics",
}
HEADS = {
    "transformers": "## transformers",
    "samples": "## torch's samples of scaled_dot_product_attention",
    "optimizers": "## torch's optimizers under remedies on steps",
}
# Tests of transformers that cannot pass with another name of attention in the place of "sdpa".
_NAMED = 'asserts that the attention in use is called "sdpa", and here it is called "qkeel"'
ANSWERED = {"test_can_set_attention_dynamically": _NAMED, "test_sdpa_can_dispatch_non_composite_models": _NAMED}
# They compile, need the hub, a GPU or several processes.
LEFT_OUT = (
    "not compile and not export and not Integration and not pipeline and not multi_gpu and not flash and not fsdp"
)

_INTRODUCTION = """# Peers' own tests

`python -m tools.suites` runs the tests of other projects with qkeel in them and writes this page. A test counts as
*the same*
where it has the outcome that it has without qkeel, on the same machine in the same run.

- transformers: its modelling tests, from a checkout that `QKEEL_TRANSFORMERS` names (an sdist has the common tests
  alone), of the version that is installed; once as they are, once with qkeel's attention wherever the tests would use
  "sdpa", once with each outermost call of a model watched.
- torch: the OpInfo samples of `scaled_dot_product_attention`, without dropout, in four dtypes: outputs, strides, errors
  and gradients of `qkeel.nn.functional_attention` against torch's function.
- torch.optim: every optimizer of `optim_db` with all its sets of arguments, on a layer of attention, under `lalr` and
  `qk_clip`. *Not run*: the optimizer alone fails on this layer, or ends with weights that are not finite.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.suites", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transformers", default=os.environ.get("QKEEL_TRANSFORMERS", ""), help="a checkout")
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--only", choices=("transformers", "samples", "optimizers"), nargs="+")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds of one family in one mode")
    parser.add_argument("--most", type=int, default=0, help="of a family run so many tests, at even distances; 0: all")
    parser.add_argument("--said", default="", help="where the checkout is from, for the page")
    parser.add_argument("--kept", type=Path, help="a folder of outcomes; none by default")
    parser.add_argument("--out", type=Path, default=Path("docs/internals/suites.md"))
    given = parser.parse_args(arguments)
    wanted = given.only or ["transformers", "samples", "optimizers"]
    written = dict(_parts(given.out.read_text(encoding="utf-8"))) if given.out.exists() else {}
    wrong = 0
    for part, run in (("transformers", _transformers), ("samples", _samples), ("optimizers", _optimizers)):
        if part in wanted:
            found, differing = run(given)
            written[HEADS[part]] = "\n".join(found).strip("\n")
            wrong += differing
            page = [f"{_INTRODUCTION}\n{_versions()}", *(written[head] for head in HEADS.values() if head in written)]
            given.out.write_text("\n\n".join(page) + "\n", encoding="utf-8")
    print(f"{given.out}: {wrong} outcomes differ")
    return int(wrong > 0)


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """The parts of a page that was written before, by their headings."""
    for part in page.split("\n## ")[1:]:
        yield f"## {part.partition(chr(10))[0]}", f"## {part}".strip("\n")


def _versions() -> str:
    import torch
    import transformers

    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, on a CPU."


def _transformers(given: argparse.Namespace) -> tuple[list[str], int]:
    lines = [HEADS["transformers"], ""]
    if not given.transformers:
        return [*lines, "Not run: `QKEEL_TRANSFORMERS` names no checkout."], 0
    if given.said:
        lines += [f"Checkout: {given.said}.", ""]
    if given.most:
        lines += [f"A sample: of each family {given.most} tests, at even distances in the order of its file.", ""]
    lines += [
        "| family | tests that pass without qkeel | with | the same | qkeel's part | others |",
        "|---|---|---|---|---|---|",
    ]
    wrong, told = 0, []
    for family in given.families:
        plain = _tested(given, family, "plain")
        if isinstance(plain, str):
            lines.append(f"| {family} | not run: {plain} | | | | |")
            wrong += 1
            continue
        passed = [test for test, outcome in plain["outcomes"].items() if outcome == "passed"]
        count = f"{len(passed)}, then the time was over" if "stopped" in plain else len(passed)
        for mode, words in MODES.items():
            found = _tested(given, family, mode)
            if isinstance(found, str):
                lines.append(f"| {family} | {count} | {words} | not run: {found} | | |")
                wrong += 1
                continue
            same = sum(found["outcomes"].get(test) == "passed" for test in passed)
            other = [test for test in passed if found["outcomes"].get(test, "not reached") != "passed"]
            seen = ", ".join(f"{count:,} {what}" for what, count in sorted(found["seen"].items())) or "none"
            lines.append(f"| {family} | {count} | {words} | {same} | {seen} | {len(other)} |")
            for test in other:
                name = test.rpartition("::")[2]
                answer = ANSWERED.get(name, "") if mode == "qkeel" else ""
                wrong += not answer
                told.append(f"- {name} ({family}, {mode}): {answer or _reason(found, test)}")
    return [*lines, "", *(told or (["No test differs."] if not wrong else []))], wrong


def _reason(found: dict[str, Any], test: str) -> str:
    return (
        found["reasons"]
        .get(test, found["outcomes"].get(test, "not reached before the time was over"))
        .replace("|", "/")
    )


def _tested(given: argparse.Namespace, family: str, mode: str) -> dict[str, Any] | str:
    """The outcomes of a family's tests; in words where pytest itself fails."""
    home = Path(given.transformers).absolute()
    file = home / "tests" / "models" / family / f"test_modeling_{family}.py"
    if not file.exists():
        return "the checkout has no such file"
    with tempfile.TemporaryDirectory() as folder:
        out = (given.kept or Path(folder)).absolute() / f"{family}-{mode}.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not the folder above: its `tests` would stand in the place of the checkout's.
        paths = [str(home), str(Path(__file__).parent), str(Path.cwd() / "src")]
        environment = {
            **os.environ, "QKEEL_SUITE": mode, "QKEEL_SUITE_OUT": str(out), "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "QKEEL_SUITE_MOST": str(given.most or ""),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "peer_plugin", "-k", LEFT_OUT,
            "-p", "no:cacheprovider", "--rootdir", str(home), str(file),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, cwd=home, timeout=given.timeout, check=False, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            if out.exists():
                return json.loads(out.read_text()) | {"stopped": True}
            return f"not over after {given.timeout:g} s"
        if out.exists() and (found := json.loads(out.read_text()))["outcomes"]:
            return found
        said = (done.stdout + done.stderr).strip().splitlines() or ["no word"]
        return f"pytest ended with {done.returncode}: {said[-1][:160]}".replace("|", "/")


def _samples(given: argparse.Namespace) -> tuple[list[str], int]:
    from tools.suites.operator_samples import outcomes

    asked, same, different = outcomes()
    lines = [HEADS["samples"], "", "| what | asked | the same |", "|---|---|---|"]
    lines += [f"| {what} | {count} | {same[what]} |" for what, count in asked.items()]
    lines += ["", *(f"- {c.what} of {c.sample}: {c.difference}" for c in different)]
    return lines if different else [*lines, "No sample differs."], len(different)


def _optimizers(given: argparse.Namespace) -> tuple[list[str], int]:
    from tools.suites.optimizers import verdicts

    found = list(verdicts())
    lines = [HEADS["optimizers"], ""]
    lines += ["| optimizer | remedy | right | refused | not run | wrong |", "|---|---|---|---|---|---|"]
    for name, remedy in dict.fromkeys((v.optimizer, v.remedy) for v in found):
        counts = Counter(v.verdict for v in found if (v.optimizer, v.remedy) == (name, remedy))
        cells = " | ".join(str(counts[kind]) for kind in ("right", "refused", "not run", "wrong"))
        lines.append(f"| {name} | `{remedy}` | {cells} |")
    told = dict.fromkeys(
        f"- {v.optimizer}, `{v.remedy}`: {v.verdict}: {v.said}" for v in found if v.verdict == "refused"
    )
    wrong = [f"- {v.optimizer} ({v.arguments}), `{v.remedy}`: wrong: {v.said}" for v in found if v.verdict == "wrong"]
    return [*lines, "", *wrong, *told], len(wrong)


if __name__ == "__main__":
    sys.exit(main())
