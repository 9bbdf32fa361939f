"""Figures for papers: which files there are, what they show, and that the same numbers make the same file."""

import sys
from pathlib import Path

import pytest
import torch
from synthetic_study import grid, make_study
from synthetic_watch import Seen, make_watch

from qkeel import attention_maps
from qkeel.cli.app import main
from qkeel.errors import MissingLibraryError, UnknownNameError
from qkeel.nn import Attention
from qkeel.report.figures import figures

SMALL = Seen(layers=3, heads=4, samples=12)


def test_a_watched_run_and_a_study_are_drawn_the_same_each_time(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = make_watch(tmp_path / "run", SMALL)
    first = figures(run, tmp_path / "a", formats=["pdf", "svg"])
    again = figures(run, tmp_path / "b", formats=["pdf", "svg"])
    names = ("max_logit", "entropy", "query_norm", "key_norm", "heads")
    assert [path.name for path in first] == [
        f"{name}.{kind}" for name in names for kind in ("pdf", "svg")
    ]
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(first, again)] == [
        True
    ] * len(first)
    text = (tmp_path / "a" / "max_logit.svg").read_text(encoding="utf-8")
    assert "largest attention logit (nats)" in text
    assert "layer 2" in text or ">2<" in text
    study = make_study(
        tmp_path / "study",
        grid(("none", "qk_norm", "lalr:tau=0.1"), (0.01, 0.1), (0, 1, 2)),
    )
    assert (
        main(
            [
                "figures",
                str(study),
                "--out",
                str(tmp_path / "s"),
                "--formats",
                "svg",
                "--baseline",
                "qk_norm",
            ]
        )
        == 0
    )
    drawn = {Path(line).stem for line in capsys.readouterr().out.splitlines()}
    assert drawn == {
        "val_loss_by_lr",
        "max_logit_by_lr",
        "max_logit_lr_0.01",
        "max_logit_lr_0.1",
        "gains",
    }
    assert "minus that of the remedy" in (tmp_path / "s" / "gains.svg").read_text(
        encoding="utf-8"
    )


class Layers(torch.nn.ModuleDict):
    """Layers of attention one after another, by names that a folder could not hold."""

    def forward(self, x):
        for layer in self.values():
            x = layer(x)
        return x


def test_each_layer_of_attention_maps_has_a_figure_of_its_own(tmp_path):
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    names = ["a/b", "a_b", "c d", "A"]
    model = Layers({name: Attention(16, 2) for name in names})
    maps = attention_maps(model, torch.randn(1, 5, 16))
    files = figures(maps, tmp_path / "a", formats=["svg"], width=4.0)
    assert sorted(path.name for path in files) == sorted(
        [f"attention_{name}.svg" for name in ("a%2Fb", "a_b", "c%20d", "A")]
    )
    assert sorted((tmp_path / "a").iterdir()) == sorted(files)
    again = figures(maps, tmp_path / "b", formats=["svg"], width=4.0)
    assert [a.read_bytes() == b.read_bytes() for a, b in zip(files, again)] == [
        True
    ] * 4
    (alone,) = figures(
        attention_maps(Attention(16, 2), torch.randn(1, 5, 16)),
        tmp_path / "c",
        formats=["svg"],
    )
    assert alone.name == "attention.svg"


def test_without_matplotlib_or_a_format_that_it_has_it_says_what_to_do(
    tmp_path, monkeypatch
):
    with pytest.raises(UnknownNameError, match="unknown format of figures 'pfd'"):
        figures(tmp_path, tmp_path / "out", formats=["pfd"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibraryError, match="pip install matplotlib"):
        figures(make_watch(tmp_path / "run", SMALL), tmp_path / "out")
    assert not (tmp_path / "out").exists()
