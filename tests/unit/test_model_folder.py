"""Model folders: what is written, older ones, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewise.core.arch import load_arch
from tilewise.core.model import Measured, load_model, save_model
from tilewise.core.packed import Numbers
from tilewise.errors import ModelError
from tilewise.ops.configs import load_pool
from tilewise.ops.contract import get_op
from tilewise.ops.vendor import VendorKernel
from tilewise.selection.models import SHIPPED


def test_a_model_loads_without_lightgbm_or_dataframes(small_model: Path) -> None:
    code = (
        "import sys; from tilewise.core.model import Measured, load_model; "
        f"load_model({str(small_model)!r}); "
        "bad = {'lightgbm', 'sklearn', 'polars', 'pandas', 'pyarrow', 'torch'} & set(sys.modules); "
        "sys.exit(', '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def copied(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


@pytest.mark.parametrize("name", ["model.json.gz", "numbers.gz", "feature_spec.json"])
def test_a_flipped_byte_is_refused(small_model: Path, tmp_path: Path, name: str) -> None:
    folder = copied(small_model, tmp_path / "m")
    body = bytearray((folder / name).read_bytes())
    body[len(body) // 2] ^= 1
    (folder / name).write_bytes(body)
    with pytest.raises(ModelError, match=rf"{name} has sha256 .* the manifest says"):
        load_model(folder)


def rewritten(folder: Path, schema: int = 4, **texts: bytes) -> None:
    """Puts other contents into a model's compressed files, sealed as they should be."""
    manifest = json.loads((folder / "manifest.json").read_text()) | {"schema": schema}
    for name, text in texts.items():
        path = folder / {"body": "model.json.gz", "numbers": "numbers.gz"}[name]
        path.write_bytes(gzip.compress(text))
        manifest["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


def contents(folder: Path) -> tuple[str, Numbers]:
    body, numbers = ((folder / n).read_bytes() for n in ("model.json.gz", "numbers.gz"))
    return gzip.decompress(body).decode(), Numbers(gzip.decompress(numbers))


def test_a_folder_of_schema_3_is_read(small_model: Path, tmp_path: Path) -> None:
    """Its numbers stood among the rest, in base64."""
    folder = copied(small_model, tmp_path / "m")
    text, numbers = contents(folder)

    def in_base64(found: re.Match[str]) -> str:
        kind, at, count = found[1], int(found[3]), int(found[4])
        part = numbers.data[at : at + count * int(kind[1])]
        return f"{kind}{found[2]}:{b64encode(part).decode()}"

    text = re.sub(r"(\w\d)((?:/\d+)?)@(\d+)\+(\d+)", in_base64, text)
    rewritten(folder, 3, body=text.replace('{"packed":"u1:', '{"packed":"').encode())
    (folder / "numbers.gz").unlink()
    old, new = load_model(folder), load_model(small_model)
    assert list(old.measured.problems) == list(new.measured.problems)
    assert np.array_equal(old.measured.points, new.measured.points)
    for name, forest in new.forests.items():
        first, second = Numbers(), Numbers()
        assert old.forests[name].to_dict(first) == forest.to_dict(second)
        assert first.data == second.data

    save_model(old, tmp_path, {})
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == 4
    assert load_model(tmp_path).forests.keys() == new.forests.keys()


def test_a_newer_schema_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))
    with pytest.raises(ModelError, match=r"schema 99; this version reads up to 5\. Update"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "why"),
    [("[]", "foreign"), ("{}", "foreign"), ("nonsense", "not JSON"), (None, "not a model")],
)
def test_what_is_no_model_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ModelError, match=why):
        load_model(tmp_path)


def test_numbers_that_are_missing_are_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    _, numbers = contents(folder)
    rewritten(folder, numbers=bytes(numbers.data[:-1]))
    with pytest.raises(ModelError, match=r"damaged: ValueError: .* ends beyond"):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("left", 0),
        ("right", -(2**20)),
        ("node_start", 1),
        ("leaf_start", -1),
        ("node_feature", 999),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    small_model: Path, tmp_path: Path, name: str, value: int
) -> None:
    """A node that is its own child, say, would never end."""
    folder = copied(small_model, tmp_path / "m")
    text, numbers = contents(folder)
    body = json.loads(text)
    array = numbers.get(body["forests"]["rank"][name], np.int32)
    array[0] = value
    body["forests"]["rank"][name] = numbers.put(array)
    rewritten(folder, body=json.dumps(body).encode(), numbers=bytes(numbers.data))
    with pytest.raises(ModelError, match="do not fit together"):
        load_model(folder)


def test_measured_problems_of_plain_lists_are_read() -> None:
    values = {"axes": ["at_m"], "points": [[1.0], [2.0]], "efficiency": [0.5, None], "reach": 1.0}
    found = Measured.from_dict({**values, "problems": ["{}", "{}"]}, Numbers())
    assert np.isnan(found.efficiency[1])
    first, second = Numbers(), Numbers()
    again = Measured.from_dict(found.to_dict(first), first)
    assert again.to_dict(second) == found.to_dict(Numbers())
    assert first.data == second.data
    for problems in ([], "", "{}\n{}\n{}"):
        with pytest.raises(ValueError, match="differ in number"):
            Measured.from_dict({**values, "problems": problems}, Numbers())


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "TypeError"),
        (b"{}", "KeyError"),
        (b"", "JSON"),
    ],
)
def test_a_body_that_is_none_is_refused(
    small_model: Path, tmp_path: Path, body: bytes, why: str
) -> None:
    folder = copied(small_model, tmp_path / "m")
    rewritten(folder, body=body)
    with pytest.raises(ModelError, match=f"damaged: .*{why}"):
        load_model(folder)


def test_lists_of_lists_are_no_thresholds(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    text, _ = contents(folder)
    body = json.loads(text)
    body["forests"]["rank"]["thresholds"][0] = [[1.0, 2.0]]
    rewritten(folder, body=json.dumps(body).encode())
    with pytest.raises(ModelError, match="do not fit together"):
        load_model(folder)


def test_files_of_different_models_are_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    spec = folder / "feature_spec.json"
    values = json.loads(spec.read_text())
    used = load_model(folder).forests["rank"].features
    values["features"] = [[name, text] for name, text in values["features"] if name not in used]
    spec.write_text(json.dumps(values))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][spec.name] = hashlib.sha256(spec.read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match=r"does not define .*, which model\.json\.gz uses"):
        load_model(folder)


def test_a_manifest_without_kernels_is_refused(small_model: Path, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "m")
    manifest = json.loads((folder / "manifest.json").read_text()) | {"kernels": None}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelError, match="names no list of kernels"):
        load_model(folder)


def test_kernels_of_a_family_that_was_never_measured_come_last() -> None:
    arch = load_arch("sm_90", "H200")
    model = load_model(SHIPPED / "sm_90_gemm")
    kernels = [k for k in load_pool(get_op("gemm"), arch) if getattr(k, "dtype", "") == "bf16"]
    kernels.append(VendorKernel(op_name="gemm", library="torch"))
    assert not model.handicaps(kernels).any()
    known = {n: f for n, f in model.calibration.kernels.items() if "_triton_ws_" not in n}
    names = [n for n in model.manifest["kernels"] if "_triton_ws_" not in n]
    manifest = {**model.manifest, "kernels": names}
    half = replace(model, calibration=replace(model.calibration, kernels=known), manifest=manifest)
    late = [k for k, taken in zip(kernels, half.handicaps(kernels), strict=True) if taken]
    assert late and all(k.family == "ws" for k in late)  # type: ignore[attr-defined]
    assert len(late) == sum(getattr(k, "family", "") == "ws" for k in kernels)
    none = replace(model, calibration=replace(model.calibration, engines={}))
    assert none.handicaps(kernels).all()


@pytest.mark.parametrize("op", ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"])
def test_the_h200s_convolutions_are_known_and_the_safety_nets_come_last(op: str) -> None:
    """Of some families few problems were measured: they count as known. Others never were."""
    arch = load_arch("sm_90", "H200")
    model = load_model(SHIPPED / f"sm_90_{op}")
    kernels = [k for k in load_pool(get_op(op), arch) if getattr(k, "dtype", "") == "bf16"]
    taken = model.handicaps(kernels)
    last = {k.family for k, much in zip(kernels, taken, strict=True) if much}  # type: ignore[attr-defined]
    first = {k.family for k, much in zip(kernels, taken, strict=True) if not much}  # type: ignore[attr-defined]
    unmeasured = {"padded"}
    unmeasured |= {"image"} if op == "conv_bwd_data" else set()
    unmeasured |= {"ragged", "taps"} if op != "conv_bwd_weight" else set()
    assert last == {"implicit", "packed", "merged", "direct", *unmeasured}
    assert first >= {"gemm", "im2col", "rows", "halo", "gather", "grouped", "depthwise"}
