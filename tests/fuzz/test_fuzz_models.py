"""Any model folder, its checksums in order, is refused or serves; no other end."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from material import ARCH, write_wide_model
from resealing import resealed
from spoiling import Edit, edits, spoils

from tilewise.core.model import Model
from tilewise.errors import ModelError, TilewiseError
from tilewise.learn.lightgbm_text import checked_text
from tilewise.selection.codegen import Layout
from tilewise.selection.export_c import export_c
from tilewise.selection.opening import measured_kernels, measured_problem, open_model
from tilewise.selection.scorer import NumpyScorer, make_scorer
from tilewise.selection.scorer_source import scorer_source
from tilewise.selection.selector import caveat, expectation
from tilewise.selection.steps import steps_of

JSONS = ("manifest.json", "feature_spec.json", "model.json.gz", "metrics.json")
FILES = (*JSONS, "numbers.gz")


MODELS = ("small", "wide")
"""Of one device; and of two, whose scores start from a share of an estimate."""
models = st.sampled_from(MODELS)
Held = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def held(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Held:
    """The sound models' files, unpacked."""
    wide = tmp_path_factory.mktemp("sound") / "wide"
    write_wide_model(wide)
    return {
        which: {
            name: gzip.decompress(data) if name.endswith(".gz") else data
            for name in FILES
            for data in [(folder / name).read_bytes()]
        }
        for which, folder in zip(MODELS, (material / "model", wide), strict=True)
    }


@pytest.fixture(scope="module")
def folder(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("spoiled") / "m"
    shutil.copytree(material / "model", place)
    yield place


def written(folder: Path, held: dict[str, bytes], name: str, data: bytes) -> Path:
    """The folder with one file spoiled and the others sound."""
    files = {**held, name: data}
    (folder / "manifest.json").write_bytes(held["manifest.json"])
    packed = {n: gzip.compress(d, 1) if n.endswith(".gz") else d for n, d in files.items()}
    manifest = packed.pop("manifest.json")
    resealed(folder, packed)
    if name == "manifest.json":
        (folder / name).write_bytes(_vouched(folder, manifest))
    return folder


def _vouched(folder: Path, manifest: bytes) -> bytes:
    """A spoiled manifest with the checksums of what is there, where it still has any."""
    try:
        spoiled = json.loads(manifest)
        spoiled["files"].update(json.loads((folder / "manifest.json").read_bytes())["files"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return manifest
    return json.dumps(spoiled).encode()


def serve(model: Model) -> None:
    """All that selection and export do with a model that opened."""
    kernels, problem = measured_kernels(model)[:3], measured_problem(model, 0)
    scorer = NumpyScorer(model, kernels, model.trained_on)
    found = scorer(problem)
    assert sorted(found.order.tolist()) == list(range(len(kernels)))
    scorer.nearest(problem)
    expectation(model, np.zeros(len(model.measured.axes)))
    for arch in (ARCH, *model.stands[:3]):
        caveat(model, arch)
    for forest in model.forests.values():
        steps_of(forest)
    for text in (scorer_source(Layout(model)), export_c(model, kernels, model.trained_on)):
        assert text.isascii() and "\\" not in text and "??" not in text


def opens_or_is_refused(folder: Path) -> None:
    try:
        model = open_model(folder)
    except ModelError:
        return
    try:
        serve(model)
    except TilewiseError:  # a name for the header that is none, a measured problem behind the first
        return


@fuzz(100, which=models, name=st.sampled_from(JSONS), edit=edits())
def test_values_swapped(folder: Path, held: Held, which: str, name: str, edit: Edit) -> None:
    value = edit(json.loads(held[which][name]))
    opens_or_is_refused(written(folder, held[which], name, json.dumps(value).encode()))


@fuzz(
    60,
    place=st.sampled_from(("stands", "figures", "base", "share", "has_base", "schema", "dtypes")),
    edit=edits(),
)
def test_what_models_of_many_devices_add(folder: Path, held: Held, place: str, edit: Edit) -> None:
    name = "model.json.gz" if place in ("base", "share", "has_base") else "manifest.json"
    value = json.loads(held["wide"][name])
    value[place] = edit(value[place])
    opens_or_is_refused(written(folder, held["wide"], name, json.dumps(value).encode()))


@fuzz(60, which=models, name=st.sampled_from(FILES), spoil=spoils())
def test_bytes_spoiled(
    folder: Path, held: Held, which: str, name: str, spoil: Callable[[bytes], bytes]
) -> None:
    opens_or_is_refused(written(folder, held[which], name, spoil(held[which][name])))


@fuzz(20, which=models, name=st.sampled_from(FILES[1:]), spoil=spoils())
def test_packed_bytes_spoiled(
    folder: Path, held: Held, which: str, name: str, spoil: Callable[[bytes], bytes]
) -> None:
    written(folder, held[which], name, held[which][name])
    resealed(folder, {name: spoil((folder / name).read_bytes())})
    opens_or_is_refused(folder)


@fuzz(
    60, spoil=spoils(), at=st.integers(0, 2**16), value=st.sampled_from(["-1", "9", "x", "", "1 2"])
)
def test_forest_texts(material: Path, spoil: Callable[[bytes], bytes], at: int, value: str) -> None:
    """What passes, LightGBM reads; it ends the process on what it cannot."""
    import lightgbm

    text = gzip.decompress((material / "model" / "rank.txt.gz").read_bytes())
    words = text.decode().split(" ")
    words[at % len(words)] = value
    for spoiled in (spoil(text), " ".join(words).encode()):
        try:
            passed = checked_text(spoiled.decode())
        except (ModelError, UnicodeDecodeError):
            continue
        booster = lightgbm.Booster(model_str=passed)
        booster.predict(np.zeros((1, booster.num_feature())))


@fuzz(
    15,
    which=models,
    name=st.sampled_from(["model.json.gz", "numbers.gz"]),
    edit=edits(),
    spoil=spoils(),
)
def test_compiled_scorers_walk_what_opened(
    folder: Path,
    held: Held,
    which: str,
    name: str,
    edit: Edit,
    spoil: Callable[[bytes], bytes],
) -> None:
    """C reads the same arrays as NumPy, without asking whether it may; both say the same."""
    sound = held[which][name]
    is_json = name == "model.json.gz"
    data = json.dumps(edit(json.loads(sound))).encode() if is_json else spoil(sound)
    try:
        model = open_model(written(folder, held[which], name, data))
        kernels, problem = measured_kernels(model), measured_problem(model, 0)
    except ModelError:
        return
    compiled = make_scorer(model, kernels, model.trained_on, compiled=True)
    plain = NumpyScorer(model, kernels, model.trained_on)
    mine, theirs = compiled(problem), plain(problem)
    assert np.array_equal(mine.score, theirs.score, equal_nan=True)
    assert sorted(mine.order.tolist()) == list(range(len(kernels)))
    assert mine.level == theirs.level or not np.isfinite(theirs.level)


@pytest.mark.parametrize("which", MODELS)
def test_the_sound_models_serve(folder: Path, held: Held, which: str) -> None:
    model = open_model(written(folder, held[which], "metrics.json", held[which]["metrics.json"]))
    serve(model)
    assert len(model.stands) == 1 + MODELS.index(which)
    assert model.share == (1.0, 0.5)[MODELS.index(which)]
