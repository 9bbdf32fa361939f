"""README, tutorials and guides: every call, command and option that they name exists as written; calls are made."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qkeel
from qkeel.autopilot import autopilot
from qkeel.cli.app import make_app
from qkeel.cli.commands import commands
from qkeel.monitor.monitor import Monitor
from qkeel.options import parse
from qkeel.records import HEAD_FIELDS
from qkeel.remedies import ALIASES, REMEDIES, canonical
from qkeel.spec import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/quickstart.md",
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    *sorted((ROOT / "docs/guides").glob("*.md")),
]
# Names of other programs and libraries, and of files of the reader's own: nothing here can say whether they are right.
OTHERS = {
    *(
        "accelerate launch",
        "attn/max_logit",
        "attn/layer_00/max_logit",
        "per_layer=False",
        "train/",
        "qkeel-runs/train_gpt/report.html",
        "fit",
        "prepare",
        "plugins: [my_plugins.Watch]",
        "run_train.py",
        ".",
        "--",
        "-u",
        "-m",
        "-2",
        "-3",
    ),
    *("OMP_NUM_THREADS", "OMP_NUM_THREADS=1", "TORCH_LOGS", "batch", "eps", "model(x)", "model.forward(x)", "__main__"),
}
MESSAGES = {"1 of 2 attention layers of GPT are watched. Not understood: …": "are watched. Not understood: "}
DOTTED = re.compile(r"[a-z_]+(\.\w+)+(\(\))?")
KEYWORD = re.compile(r"(\w+)=(.*)")
FLAGS = re.compile(r"--[a-z][a-z-]*")


def spans(page: Path) -> list[str]:
    """The code of a page that stands in its sentences and tables."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return list(dict.fromkeys(code.replace(r"\|", "|") for code in re.findall(r"`([^`\n]+)`", text)))


# README is checked span by span. Elsewhere those spans are that name a command, a call or a flag of qkeel: what other
# code a guide quotes, such as module names of a foreign model, nothing here can know.
OF_QKEEL = re.compile(r"(qkeel[ .\w]|--[a-z]|make [a-z]|pip install \"?qkeel|watch\(|apply\(|find_sites\().*")
SHOWN = [
    (str(page.relative_to(ROOT)), code)
    for page in PAGES
    for code in spans(page)
    if page == PAGES[0] or OF_QKEEL.match(code)
]


class Model(nn.Module):
    """Two layers of attention over tokens, as a script of transformers would call it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(qkeel.nn.Attention(8, 2) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Namespace(dict[str, Any]):
    """What the code of the pages may use; each has objects of its own, made where they are first named."""

    def __init__(self) -> None:
        from qkeel.integrations.huggingface import QkeelCallback

        calls = {
            "watch": qkeel.watch,
            "apply": qkeel.apply,
            "find_sites": qkeel.find_sites,
            "QkeelCallback": QkeelCallback,
        }
        super().__init__(qkeel=qkeel, torch=torch, args=(), kwargs={}, **calls)
        self["image_ids"], self["text_ids"], self["q"] = [5, 6], range(5), torch.ones(1, 2, 3, 4)

    def __missing__(self, name: str) -> object:
        model = super().get("model")
        if name == "model":
            self[name] = Model()
        elif name == "batch":
            self[name] = torch.randint(0, 7, (2, 5))
        elif name == "optimizer":
            self[name] = torch.optim.AdamW(self["model"].parameters(), lr=1e-3)
        elif name == "monitor":
            self[name] = qkeel.watch(self["model"])
            self["model"](self["batch"])
        elif name == "handle":
            self[name] = qkeel.apply(self["model"], "qk_norm", batch=self["batch"])
        elif name == "pilot":
            self[name] = autopilot(self["model"], self["optimizer"])
        elif name == "sites":
            self[name] = qkeel.find_sites(self["model"], self["batch"])
        elif name == "site":
            self[name] = self["sites"][0]
        elif name == "heads":
            self[name] = self["monitor"].history
        else:
            raise KeyError(name, model)
        return self[name]


# The functions of qkeel whose keywords pages name alone.
CALLS: tuple[Callable[..., object], ...] = (qkeel.watch, qkeel.apply, qkeel.attention, qkeel.find_sites)


def run(code: str, space: Namespace) -> object:
    """The value of a call as written; `…` stands for the model, or for any arguments before keywords."""
    code = code.removeprefix("with ").removesuffix(" as monitor:").removesuffix(":")
    code = (
        code.replace("attention(…", 'attention(q, q, q, spec=qkeel.preset("baseline")')
        .replace("watch(…", "watch(model")
        .replace("(*args, **kwargs)", "(batch)")
    )
    code = code.replace("(model, *args, **kwargs)", "(model, batch)")
    if "qkeel.explain(" in code:  # of qkeel's own attention there is nothing to explain
        space["model"] = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
        space["batch"] = torch.randn(2, 5, 8)
    if "fold" in code:
        qkeel.apply(space["model"], "sigma_reparam", batch=space["batch"])
    return eval(code, {}, space)


def is_command(code: str) -> bool:
    """Whether a line is one of qkeel's; what it runs is that of `watch`."""
    words = [word for word in shlex.split(code.replace("…", "train.py")) if word]
    start = next((i + 1 for i, word in enumerate(words) if word == "qkeel"), 0)
    if not start:
        return False
    rest = ["x" if word.isupper() and len(word) > 1 else word for word in words[start:]]
    if rest in (["study"], []) or (len(rest) == 1 and rest[0] in commands()) or (rest[-1:] and is_flag(rest[-1])):
        return True  # named, without what it takes
    make_app(rest).parse_args(rest, exit_on_error=False, print_error=False)
    return True


def is_keyword(code: str) -> bool:
    """Whether `name=value` is an option of a remedy, or a keyword of a call; its value is tried where it has one."""
    found = KEYWORD.fullmatch(code)
    if not found:
        return False
    name, value = found.groups()
    if name == "QKEEL_NATIVE":
        return any("QKEEL_NATIVE" in path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    if any(name in inspect.signature(call).parameters for call in CALLS):
        space = Namespace()
        if value and "…" not in value:
            known = next(call for call in CALLS if name in inspect.signature(call).parameters)
            if known is qkeel.watch:
                qkeel.watch(space["model"], **{name: eval(value, {}, space)}).remove()
            else:
                eval(value, {}, space)
        return True
    if name == "callbacks":
        transformers = importlib.import_module("transformers")
        return name in inspect.signature(transformers.Trainer).parameters and bool(eval(value, {}, Namespace()))
    if name == "attn_implementation":
        importlib.import_module("qkeel.integrations").register_attention()
        return eval(value) in importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    if value == "…":  # an option of the remedy that the row is about
        return any(name in inspect.signature(remedy).parameters for remedy in REMEDIES.values())
    return all(canonical(f"qk_norm:{name}={one}") for one in value.split("|"))


def is_remedy(code: str) -> bool:
    """Whether it is a spec string of remedies, and one that can be used."""
    try:
        parse(code)
    except qkeel.errors.QkeelError:
        return False
    names = {part.partition(":")[0] for part in code.split("+")}
    return bool(names & {*REMEDIES, *ALIASES}) and bool(canonical(code))


def is_named(code: str) -> bool:
    """Whether a dotted or plain name is one of qkeel's, of its objects, of torch's or of Python's."""
    if code == ".lightning":
        return "class QkeelCallback" in (ROOT / "src/qkeel/integrations/lightning.py").read_text(encoding="utf-8")
    if re.fullmatch(r"\w+", code) and (
        hasattr(qkeel, code) or code in {*HEAD_FIELDS, *METHODS} or code in ("handle", "monitor", "with")
    ):
        return True
    if any(code in inspect.signature(call).parameters for call in CALLS) or code in ("explain()", "remove()"):
        return True
    if not DOTTED.fullmatch(code):
        return False
    first, *rest = code.removesuffix("()").split(".")
    value: object = Monitor if first == "monitor" else None
    if value is None:
        try:
            value = Namespace()[first]
        except KeyError:
            value = importlib.import_module(first)
    for i, name in enumerate(rest):
        if inspect.ismodule(value) and not hasattr(value, name):
            value = importlib.import_module(".".join([first, *rest[: i + 1]]))
        else:
            value = getattr(value, name)
    return True


def is_literal(code: str) -> bool:
    """Whether a text in quotes names a sink or a remedy."""
    if not re.fullmatch(r'"\w+"', code):
        return False
    name = code.strip('"')
    return name in importlib.import_module("qkeel.monitor.sinks").SINKS or is_remedy(name)


def is_file(code: str) -> bool:
    """Whether it is a file of the repository."""
    return (ROOT / code).is_file()


@functools.cache
def known_flags() -> str:
    """The help of the watcher and the text of the example script."""
    script = (ROOT / "examples" / "train_gpt.py").read_text(encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "qkeel", "watch", "--help"], capture_output=True, text=True)
    return done.stdout + script


@functools.cache
def known_parameters() -> str:
    """The text of the commands and of the configurations whose fields are flags."""
    folders = (ROOT / "src/qkeel/cli", ROOT / "src/qkeel/lab")
    return "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))


def is_flag(code: str) -> bool:
    """Whether flags, with values or not, are those of a command or of the example script."""
    flags = FLAGS.findall(code)
    if not code.startswith("--") or not flags:
        return False
    return all(
        re.search(rf"{flag}\b(?!-)", known_flags())
        or re.search(rf"\b{flag[2:].replace('-', '_')}\b *[:=]|\"{flag}\"", known_parameters())
        for flag in flags
    )


def is_call(code: str) -> bool:
    """Whether a call names a function of qkeel and keywords that it takes; its other arguments are the reader's own."""
    try:
        call = ast.parse(code.replace("…", "x"), mode="eval").body
    except SyntaxError:
        return False
    while isinstance(call, ast.Attribute) or (isinstance(call, ast.Call) and "(" in ast.unparse(call.func)):
        call = call.value if isinstance(call, ast.Attribute) else call.func
    if not isinstance(call, ast.Call):
        return False
    function: Any = Namespace()["qkeel"]
    for name in ast.unparse(call.func).removeprefix("qkeel.").split("."):
        function = getattr(function, name) if hasattr(function, name) else importlib.import_module(f"qkeel.{name}")
    taken = inspect.signature(function).parameters.values()
    names = {one.name for one in taken}
    options = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)
    return all(one.arg in names or options for one in call.keywords)


def is_target(code: str) -> bool:
    """Whether it is a target of the Makefile, or an install of qkeel with extras that there are."""
    if code.startswith("make "):
        return bool(re.search(rf"^{code.split()[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    wanted = re.fullmatch(r'pip install "?(?:qkeel|\.)(?:\[(\w+)\])?"?', code)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return bool(wanted) and wanted[1] in (None, *project["optional-dependencies"])


CHECKS = (is_target, is_file, is_flag, is_command, is_remedy, is_literal, is_keyword, is_named)


def is_known(code: str) -> bool:
    """Whether some check knows it; one that raises has found a call that is wrong."""
    if code in OTHERS:
        return True
    if code in MESSAGES:
        return any(MESSAGES[code] in path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return any(check(code) for check in CHECKS)


NEEDS = {"to_pandas": "pandas", ".plot(": "matplotlib", "wandb": "wandb"}


@pytest.mark.parametrize(("page", "code"), SHOWN)
@pytest.mark.filterwarnings("ignore")
def test_what_a_page_names_is_there_and_its_calls_run(page: str, code: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    call = re.search(r"\w\(", code) and not KEYWORD.fullmatch(code) and code not in OTHERS
    if not call or code in ("explain()", "remove()"):
        assert is_known(code), (
            f"{page}: `{code}` is nothing that qkeel knows; add what it is to OTHERS if it is another's"
        )
        return
    if page != "README.md":
        assert is_call(code) or is_command(code), f"{page}: `{code}` names no call of qkeel with such keywords"
        return
    if "(…)" in code:
        assert is_named(code.replace("(…)", ""))
        return
    for word, library in NEEDS.items():
        if word in code:
            pytest.importorskip(library)
    found = run(code, Namespace())
    if isinstance(found, Monitor):
        found.remove()


def test_code_that_is_wrong_is_noticed() -> None:
    for wrong in ("qk_nrm", "make demos", "qkeel.retrofitt", "--autopilott", "docs/none.md", "qkeel.monitor.Adaptiv()"):
        with pytest.raises(Exception):  # noqa: B017
            assert is_known(wrong)
    with pytest.raises(qkeel.errors.UnknownNameError):
        run('watch(…, stats="maxx")', Namespace())
