"""Commands and options of earlier versions, each with a sentence that says where its content went."""

from __future__ import annotations

from collections.abc import Sequence

# As typed after `qkeel`; an option is listed behind its command.
RETIRED = {
    "bench": "python -m benchmarks.kernels, in the repository, times the attention kernels side by side",
    "check --strict": "a check that cannot decide ends with exit code 4",
    "completion": "`qkeel --help` lists the commands, and `qkeel COMMAND --help` the options of one",
    "config": "write a recipe by hand, as TOML like steps = 500; config.json in a run's directory lists all settings",
    "demo --stack": "runs train one by one, --jobs of them at a time",
    "merge": "run the study's own command on every machine, with one shared folder as --out",
    "recommend": "the tables of expected logits and gains are in docs/guides/choose-a-remedy.md",
    "replay": "qkeel.monitor.replay(history) applies the rules of alarms to a stored run",
    "run --json": "summary.json in the run's directory holds the result",
    "run --tokens": "text is read as bytes; give the tokens of another tokenizer as a .bin file in --data",
    "scan --tensors": "--json has all tensors beside the layers",
    "study --baseline": "`qkeel report OUT --baseline REMEDY` compares with another remedy",
    "study --images": "the lab's images are its handwritten digits",
    "study --shard": "run the same command on every machine, with one shared folder as --out",
    "study --stack": "runs train one by one, --jobs of them at a time",
    "study --tokens": "text is read as bytes; give the tokens of another tokenizer as a .bin file in --data",
    "study chaos": "python -m experiments.studies.chaos, in the repository",
    "study drift": "python -m experiments.studies.drift, in the repository",
    "study edge": "python -m experiments.studies.edge, in the repository",
    "study precision": "python -m experiments.studies.precision, in the repository",
    "study transfer": "python -m experiments.studies.transfer, in the repository",
    "study --tune": "python -m experiments.studies.transfer, in the repository, chooses each remedy's rate on other seeds",
    "watch --adaptive": "by default every 2nd step is measured while logits are changing; --every sets another number",
    "watch --log-spaced": "in Python: qkeel.watch(model, optimizer, every=qkeel.monitor.LogSpaced())",
    "watch --live": "open report.html in the run's directory: during the run it is rewritten and reloads itself",
}


def retired(words: Sequence[str]) -> str | None:
    """Returns what to use instead of a retired command or option, or None if the words name neither.

    >>> retired(["replay", "runs/a"])
    '`qkeel replay` is gone: qkeel.monitor.replay(history) applies the rules of alarms to a stored run'
    >>> retired(["report", "replay"]) is None
    True
    """
    options = {word.partition("=")[0] for word in words}
    for name, instead in RETIRED.items():
        first, _, second = name.partition(" ")
        is_option = second.startswith("--")
        is_second = second in options if is_option else [second] == [*words[1:2]]
        if [first] == [*words[:1]] and (not second or is_second):
            return f"`qkeel {name}` is gone: {instead}"
    return None
