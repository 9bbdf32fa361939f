"""The benchmark of watching runs at toy size. No test here looks at a time."""

import json

from benchmarks import watch


def test_the_watch_benchmark_runs(tmp_path, capsys):
    watch.main(["--toy", "--rounds", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    tables = json.loads(path.read_text())["tables"]
    assert [row["case"] for row in tables["training steps, eager"]][
        1
    ] == "full statistics every 10th"
    assert tables["discovery, CPU s"]["find_sites"] > 0
    assert "removed monitor" in path.with_suffix(".md").read_text()
    assert "written" in capsys.readouterr().out
