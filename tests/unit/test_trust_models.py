"""Model folders are data: whatever is in one, no code runs and nothing crashes."""

from __future__ import annotations

import gzip
import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from resealing import copied, renamed, resealed

from tilewise.core.arch import load_arch
from tilewise.core.features import MIXED, FeatureSet, Field
from tilewise.core.forest import Forest, _quantised
from tilewise.core.model import Model, forest_text, load_model
from tilewise.core.packed import Numbers
from tilewise.errors import ExpressionError, ModelError, TilewiseError
from tilewise.learn.dataset import Dataset
from tilewise.learn.evaluate import evaluate
from tilewise.learn.fit import Trainer
from tilewise.learn.lightgbm_text import checked_text
from tilewise.learn.params import Params
from tilewise.learn.warm import warm_start
from tilewise.selection.codegen import Layout
from tilewise.selection.export_c import export_c
from tilewise.selection.models import _load, model_rankers
from tilewise.selection.opening import measured_kernels, open_model
from tilewise.selection.ranker import ModelRanker
from tilewise.selection.scorer_source import scorer_source

INJECTED = 'm = 0;\n#define RAN\nint sy(const char*) asm("system"); const int ran = sy("true");//'


def first_feature(folder: Path) -> str:
    return load_model(folder).forests["rank"].features[0]


def test_a_name_that_is_source_is_refused_where_it_is_read(
    small_model: Path, tmp_path: Path
) -> None:
    folder = renamed(copied(small_model, tmp_path / "m"), first_feature(small_model), INJECTED)
    with pytest.raises(ModelError, match="is not a valid name"):
        load_model(folder)


def with_name(model: Model, old: str, new: str) -> Model:
    """The model with a feature called something else, past all reading."""
    call = {old: new}.get
    features = {call(name, name): source for name, source in model.features.features.items()}
    forests = {
        title: replace(forest, features=tuple(call(n, n) for n in forest.features))
        for title, forest in model.forests.items()
    }
    spec = FeatureSet(model.features.fields, model.features.helpers, features)
    return replace(model, features=spec, forests=forests)


def test_a_name_that_is_source_is_refused_where_source_is_written(small_model: Path) -> None:
    model = load_model(small_model)
    mixed = next(n for n in model.forests["rank"].features if model.features.scopes[n] == MIXED)
    kernels, arch = measured_kernels(model), load_arch("gfx950")
    for write in (lambda m: scorer_source(Layout(m)), lambda m: export_c(m, kernels, arch)):
        assert "x_renamed" in write(with_name(model, mixed, "renamed"))
        with pytest.raises(ExpressionError, match="is not a valid name"):
            write(with_name(model, mixed, INJECTED))


@pytest.mark.parametrize("word", ["a\nb", "a b", "", "x" * 200, "*/", "é"])
def test_words_are_words(word: str) -> None:
    spec = {"fields": [{"name": "p_layout", "words": [word]}], "helpers": [], "features": []}
    with pytest.raises(ExpressionError, match="is not a valid word"):
        FeatureSet.from_dict(spec)


def test_definitions_are_bounded() -> None:
    """Compiled code keeps a row of values on its stack."""
    many = [[f"f{i}", "p_m"] for i in range(3000)]
    spec = {"fields": [{"name": "p_m", "words": []}], "helpers": [], "features": many}
    with pytest.raises(ExpressionError, match="2048 are allowed"):
        FeatureSet.from_dict(spec)


def test_a_models_name_ends_no_comment(small_model: Path) -> None:
    model = load_model(small_model)
    named = replace(model, manifest={**model.manifest, "name": "*/ int x; /*"})
    text = export_c(named, measured_kernels(model), load_arch("gfx950"))
    assert text.startswith("/* __ int x; __\n")


def flipped(folder: Path, name: str) -> None:
    body = bytearray((folder / name).read_bytes())
    body[len(body) // 2] ^= 1
    (folder / name).write_bytes(body)


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.json", "oof.parquet", "folds.json", "rank.txt.gz"),
        *("model.json.gz", "numbers.gz", "feature_spec.json"),
    ],
)
def test_every_file_is_checked_when_it_is_read(
    small_data: Dataset, small_model: Path, tmp_path: Path, name: str
) -> None:
    folder = copied(small_model, tmp_path / "m")
    flipped(folder, name)

    def read() -> None:
        load_model(folder)
        if name == "rank.txt.gz":
            forest_text(folder, "rank")
        else:
            evaluate(folder, small_data)

    with pytest.raises(ModelError, match=f"{name} has sha256"):
        read()


def test_scores_that_are_no_numbers_judge_nothing(
    small_data: Dataset, small_model: Path, tmp_path: Path
) -> None:
    folder = copied(small_model, tmp_path / "m")
    table = parquet.read_table(folder / "oof.parquet").to_pydict()
    table["score"][0] = float("nan")
    out = pa.BufferOutputStream()
    parquet.write_table(pa.table(table), out)
    resealed(folder, {"oof.parquet": out.getvalue().to_pybytes()})
    with pytest.raises(ModelError, match="no numbers"):
        evaluate(folder, small_data)


def test_unpacking_has_a_limit(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    bomb = gzip.compress(b"\0" * (300 << 20), 1)
    resealed(folder, {"rank.txt.gz": bomb})
    with pytest.raises(ModelError, match="more than 268435456 bytes are packed"):
        forest_text(folder, "rank")


def resized(text: str) -> str:
    """The text with the sizes of its trees in its head as they are."""
    head, *trees = re.split(r"(?<=\n)(?=Tree=)", text.partition("\nend of trees\n")[0] + "\n")
    sizes = " ".join(str(len(tree.encode())) for tree in trees)
    return text.replace(head, re.sub(r"(?m)^tree_sizes=.*$", f"tree_sizes={sizes}", head), 1)


def spoiled_texts(text: str) -> list[str]:
    tree = text.index("leaf_value=")
    return [
        resized(text.replace("\nTree=1\n", "\nTree=1\ncat_boundaries=0 1\n", 1)),
        resized(text[: tree + 11] + "1.5 " + text[tree + 11 :]),
        resized(text.replace("leaf_count=", "leaf_count=1 ", 1)),
        text.replace("decision_type=2", "decision_type=3", 1),
        text.replace("\n\n\nend of trees", "\n\n\n\nend of trees", 1),
        text[: tree + 11] + "1.5 " + text[tree + 11 :],
        text.replace("num_leaves=", "num_leaves=9", 1),
        text.replace("left_child=1", "left_child=100000", 1),
        text.replace("num_cat=0", "num_cat=7", 1),
        text.replace("split_feature=", "split_feature=99999 ", 1),
        text.replace("max_feature_idx=", "max_feature_idx=9", 1),
        text.replace("\nTree=1\n", "\nTree=1\ncat_boundaries=0 1\n", 1),
        text[: len(text) // 2],
        text.replace("threshold=", "threshold=nan ", 1),
        "",
        text.replace("objective=regression", "objective=segression"),
    ]


def test_lightgbm_reads_no_text_that_is_not_its_own(
    small_data: Dataset, small_model: Path, tmp_path: Path
) -> None:
    """A resealed text of another length made LightGBM end the process."""
    text = forest_text(small_model, "rank")
    assert checked_text(text).endswith("end of trees\n")
    for number, spoiled in enumerate(spoiled_texts(text)):
        assert spoiled != text, number
        folder = copied(small_model, tmp_path / f"m{number}")
        resealed(folder, {"rank.txt.gz": gzip.compress(spoiled.encode())})
        with pytest.raises(ModelError, match="damaged"):
            warm_start(folder, Trainer(small_data), Params())


@pytest.mark.parametrize("leaf", ["1e999", "-1e999", "1e308"])
def test_leaves_that_add_up_to_no_number_are_refused(small_model: Path, leaf: str) -> None:
    text = forest_text(small_model, "rank")
    spoiled = re.sub(r"(?<=leaf_value=)[^ \n]+", leaf, text)
    sizes = [
        len(t.encode()) for t in re.split(r"(?<=\n)(?=Tree=)", spoiled.split("\nend")[0] + "\n")
    ]
    spoiled = re.sub(r"tree_sizes=.*", "tree_sizes=" + " ".join(map(str, sizes[1:])), spoiled)
    with pytest.raises(ModelError, match="a finite number"):
        checked_text(spoiled)


@pytest.mark.parametrize("unit", [1e-320, 1e-300, 1.0, 1e300])
def test_leaves_of_any_size_have_a_unit(unit: float) -> None:
    leaves, scale = _quantised([unit, -unit], [0, 2])
    assert np.isfinite(scale) and scale > 0
    assert unit < 1e-300 or leaves[0] * scale == pytest.approx(unit)


def body_of(folder: Path) -> Any:
    return json.loads(gzip.decompress((folder / "model.json.gz").read_bytes()))


def with_body(folder: Path, body: Any) -> Path:
    return resealed(folder, {"model.json.gz": gzip.compress(json.dumps(body).encode())})


TREE: dict[str, Any] = {
    **{"features": ["f"], "thresholds": [[0.5]], "node_feature": [0], "node_bin": [0]},
    **{"left": [-1], "right": [-2], "node_start": [0, 1], "leaf_start": [0, 2], "leaf": [1, 2]},
    **{"scale": 1.0, "offset": 0.0},
}
DOUBLE = [*range(1, 40), -1]
"""Every node has the next one on both sides: 2 ** 40 ways down."""


@pytest.mark.parametrize(
    "change",
    [
        {
            **{"node_feature": [0] * 40, "node_bin": [0] * 40, "left": DOUBLE, "right": DOUBLE},
            **{"node_start": [0, 40], "leaf_start": [0, 41], "leaf": [1] * 41},
        },
        {
            **{"node_feature": [], "node_bin": [], "left": [], "right": []},
            **{"node_start": [0, 0], "leaf_start": [0, 1], "leaf": [1]},
        },
        {
            **{"node_feature": [0, 0], "node_bin": [0, 0], "left": [-1, -1], "right": [-2, -2]},
            **{"node_start": [0, 1, 2], "leaf_start": [0, 2, 4], "leaf": [2**31 - 1] * 4},
        },
        {"scale": float("inf")},
        {"offset": float("nan")},
        {"thresholds": [[float("nan")]]},
        {"thresholds": [[2.0, 1.0]]},
        {"right": [-1]},
        {"node_bin": [1]},
        {"node_bin": [-1]},
        {"node_feature": [1]},
    ],
    ids=lambda change: ",".join(change),
)
def test_forests_are_trees_that_c_can_walk(change: dict[str, Any]) -> None:
    assert Forest.from_dict(TREE, Numbers()).num_trees == 1
    with pytest.raises(ValueError, match=r"do not fit together|can overflow"):
        Forest.from_dict({**TREE, **change}, Numbers())


def test_the_calibrated_time_is_where_c_looks_for_it(small_model: Path, tmp_path: Path) -> None:
    """C took the value before the first where it did not depend on both problem and kernel."""
    folder = copied(small_model, tmp_path / "m")
    spec = json.loads((folder / "feature_spec.json").read_text())
    for entry in spec["helpers"]:
        if entry[0] == "calibrated_us":
            entry[1] = "1"
    resealed(folder, {"feature_spec.json": json.dumps(spec).encode()})
    with pytest.raises(ModelError, match="does not depend on both"):
        load_model(folder)


def spoil_kernel(folder: Path) -> None:
    held = json.loads((folder / "manifest.json").read_text())["kernels"]
    resealed(folder, {}, kernels=["gemm_cpu_from_the_future", *held[1:]])


def spoil_feature(folder: Path) -> None:
    spec = json.loads((folder / "feature_spec.json").read_text())
    spec["features"][0][1] = "log2(p_m) ** 64"
    resealed(folder, {"feature_spec.json": json.dumps(spec).encode()})


def spoil_field(folder: Path) -> None:
    spec = json.loads((folder / "feature_spec.json").read_text())
    spec["fields"].append({"name": "p___class__", "words": []})
    resealed(folder, {"feature_spec.json": json.dumps(spec).encode()})


def spoil_problems(folder: Path) -> None:
    body = body_of(folder)
    body["measured"]["problems"] = "\n".join(["nonsense"] * body["measured"]["problems"]["count"])
    with_body(folder, body)


SPOILS: dict[str, Any] = {
    "kernel": spoil_kernel,
    "feature": spoil_feature,
    "field": spoil_field,
    "problems": spoil_problems,
    "figures": lambda folder: resealed(folder, {}, figures={"nosuch": 1}),
    "no figures": lambda folder: resealed(folder, {}, figures={"compute_units": 0}),
    "words for figures": lambda folder: resealed(folder, {}, figures={"features": 7}),
    "another name": lambda folder: resealed(folder, {}, figures={"name": 5}),
    "half a unit": lambda folder: resealed(folder, {}, figures={"compute_units": 0.5}),
    "stands": lambda folder: resealed(folder, {}, stands=[{"kind": 1}]),
    "stands of another kind": lambda folder: resealed(folder, {}, stands=[1]),
    "dtypes": lambda folder: resealed(folder, {}, dtypes=[7]),
    "op": lambda folder: resealed(folder, {}, op=["gemm"]),
    "device": lambda folder: resealed(folder, {}, device="nosuch"),
    "deep": lambda folder: (folder / "manifest.json").write_text("[" * 200_000),
}


@pytest.mark.parametrize("what", SPOILS)
def test_a_model_that_cannot_be_used_is_left_out_with_one_warning(
    small_model: Path,
    tmp_path: Path,
    what: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewise.settings import settings

    folder = copied(small_model, tmp_path / "m")
    SPOILS[what](folder)
    with pytest.raises(ModelError):
        open_model(folder)
    monkeypatch.setenv("TILEWISE_MODEL_DIR", str(folder))
    settings.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "tilewise"):
            assert model_rankers("gemm", load_arch("gfx950")) == []
            assert model_rankers("gemm", load_arch("gfx950")) == []
    finally:
        monkeypatch.undo()
        settings.cache_clear()
        _load.cache_clear()
    told = [record.getMessage() for record in caplog.records if str(folder) in record.getMessage()]
    assert len(told) == 1, told


def test_a_model_that_fails_when_asked_is_given_up(
    small_data: Dataset, small_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tilewise.selection.ranker import CarefulRanker

    ranker = CarefulRanker(ModelRanker(small_model, compiled=False))
    model = load_model(small_model)
    problem, arch = small_data.problems[0], load_arch("gfx950")
    kernels = tuple(small_data.kernels)
    assert ranker.why_unfit(problem, arch) is None
    assert (ranker.path, len(ranker.predict_us(problem, kernels, arch))) == ("model", len(kernels))

    def broken(*_: Any) -> Any:
        raise MemoryError

    ranker._ranker.predict_us = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "tilewise"):
        assert np.isfinite(ranker.predict_us(problem, kernels, arch)).all()
        assert model.name in str(ranker.why_unfit(problem, arch))
    assert ranker.path == "analytic"
    assert len(caplog.records) == 1


def test_fields_have_prefixes() -> None:
    with pytest.raises(TilewiseError, match="starts with none of"):
        FeatureSet((Field(name="q_m"),), {}, {}).check()
