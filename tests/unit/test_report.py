"""The report: what it tells, that it asks nobody, and that it works in a browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resealing import copied, resealed
from typer.testing import CliRunner

from tilewise.cli.app import app
from tilewise.core.measurement import Measurement
from tilewise.data.store import Store, write_rows
from tilewise.errors import InputError, ModelError
from tilewise.report.page import _data, importances_of

ROOT = Path(__file__).parents[2]
STORE = ROOT / "datasets" / "emerald" / "conv_bwd_weight"
LEARNED = (STORE, ROOT / "datasets" / "turin" / "conv_bwd_weight")
"""What the shipped model learned from."""
MODEL = ROOT / "src" / "tilewise" / "models" / "x86_avx512_conv_bwd_weight_fp32"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(w) for w in words], catch_exceptions=False)


def content(page: Path) -> dict[str, Any]:
    """What the page's script draws."""
    found = re.search(r'id="content">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    value: dict[str, Any] = json.loads(found[1])
    return value


@pytest.fixture(scope="module")
def some_rows() -> list[Measurement]:
    """Readings of forty problems, some of them failures."""
    rows = list(Store(STORE).measurements(latest=False))
    keys = sorted({row.problem_key for row in rows})[:40]
    own = [row for row in rows if row.problem_key in keys]
    dead = {"status": "timeout", "time_us": None, "tflops": None, "gb_s": None}
    return [replace(row, **dead) if at % 50 == 0 else row for at, row in enumerate(own)]


@pytest.fixture(scope="module")
def page(some_rows: list[Measurement], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model trained on these readings, so that every section is there."""
    folder = tmp_path_factory.mktemp("report")
    write_rows(folder / "store", some_rows)
    words = ("--trees", 20, "--leaves", 8, "--folds", 3, "--out", folder / "model", "--json")
    assert run("train", folder / "store", *words).exit_code == 0
    target = folder / "report.html"
    done = run("report", folder / "store", "--model", folder / "model", "--out", target, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == 40
    return target


def test_a_report_has_every_section(page: Path) -> None:
    found = content(page)
    drawn = {"efficiency", "oracle", "roofline", "calibration", "importances", "failures"}
    assert set(found["plots"]) == drawn
    assert set(found["tables"]) == {"problems", "kernels", "coverage"}
    rows = found["tables"]["problems"]["rows"]
    assert len(rows) == 40
    assert rows == sorted(rows, key=lambda row: row[0])
    assert "timeout" in {trace["name"] for trace in found["plots"]["failures"]["data"]}
    assert found["notes"]["efficiency"].endswith(", judged on 40 problems out of fold.")
    reached = found["plots"]["efficiency"]["data"][0]["x"]
    assert reached == sorted(set(reached))  # a step a value, not one a problem


def lead(page: Path) -> str:
    """What a page says first."""
    found = re.search(r"<p class='lead'>(.*?)</p>", page.read_text())
    assert found is not None
    return found[1].replace("\N{NO-BREAK SPACE}", " ")


def test_a_report_begins_with_what_it_comes_to(page: Path, tmp_path: Path) -> None:
    told = lead(page)
    assert re.search(r"chosen kernel runs at [\d.]+ % of the fastest", told)
    assert "vendor" not in told  # which these readings do not have
    store = ROOT / "datasets" / "turin" / "conv_bwd_weight"
    assert run("report", store, "--out", tmp_path / "r.html").exit_code == 0
    told = lead(tmp_path / "r.html")
    assert "chosen" not in told  # by no model
    share, won, count = re.findall(r"[\d.]+(?= %)|[\d,]+(?= of)|(?<=of )[\d,]+", told)
    assert 0 < float(share) < 100 and 0 < int(won) < int(count)


def test_a_report_asks_nobody(page: Path) -> None:
    """No script, style, font or picture from elsewhere."""
    text = page.read_text()
    head = text[: text.index("<script>")]
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", head)
    assert text.count("<script src") == 0
    assert "@import" not in head


def test_words_from_a_store_are_no_markup(some_rows: list[Measurement], tmp_path: Path) -> None:
    """A device's name comes from a file."""
    evil = "</script><img src=x onerror=alert(1)>"
    write_rows(tmp_path / "store", [replace(row, device=evil) for row in some_rows[:60]])
    done = run("report", tmp_path / "store", "--out", tmp_path / "r.html")
    assert done.exit_code == 0, done.stderr
    assert "<img" not in (tmp_path / "r.html").read_text().split("<script>")[0]


@pytest.mark.parametrize("share", ["NaN", "-0.1", "1e999", "1" + 400 * "0", '"0.5"', "[]"])
def test_shares_that_cannot_be_are_refused(small_model: Path, tmp_path: Path, share: str) -> None:
    folder = copied(small_model, tmp_path / "m")
    resealed(folder, {"importances.json": f'{{"p_m": {share}}}'.encode()})
    with pytest.raises(ModelError, match="no share"):
        importances_of(folder)


def test_a_store_of_failures_alone_has_a_page(some_rows: list[Measurement], tmp_path: Path) -> None:
    dead = {"status": "timeout", "time_us": None, "tflops": None, "gb_s": None, "min_us": None}
    write_rows(tmp_path / "store", [replace(row, **dead) for row in some_rows])
    done = run("report", tmp_path / "store", "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.stderr
    assert set(content(tmp_path / "page.html")["plots"]) == {"failures"}


def test_times_that_cannot_be_are_refused(some_rows: list[Measurement], tmp_path: Path) -> None:
    """Rates of 1e-310 us are infinite."""
    write_rows(tmp_path / "store", [replace(r, time_us=r.time_us and 1e-310) for r in some_rows])
    with pytest.raises(InputError, match="`data check` lists such rows"):
        run("report", tmp_path / "store", "--out", tmp_path / "page.html")


def test_what_overflows_is_null_on_the_page() -> None:
    assert json.loads(_data({"y": (1.0, float("inf"), float("nan")), "x": "<"})) == {
        "y": [1.0, None, None],
        "x": "<",
    }


def test_a_shipped_model_is_judged_as_it_noted(tmp_path: Path) -> None:
    done = run("report", *LEARNED, "--model", MODEL, "--out", tmp_path / "r.html")
    assert done.exit_code == 0, done.stderr
    found = content(tmp_path / "r.html")
    assert "as noted in training" in found["notes"]["efficiency"]
    metrics = json.loads((MODEL / "metrics.json").read_text())
    worst = found["tables"]["problems"]["rows"][0][0]
    assert worst == pytest.approx(metrics["efficiency"]["min"], abs=0.02)
    # What was chosen is not noted: no empty columns tell of it.
    assert found["tables"]["problems"]["columns"] == ["%", "problem", "best us", "best"]


def test_nothing_is_overwritten_unasked(page: Path) -> None:
    with pytest.raises(InputError, match="--force"):
        run("report", STORE, "--out", page)


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    quiet = ("background-networking", "component-update", "sync", "gpu")
    for word in ("--headless=new", "--no-sandbox", *(f"--disable-{name}" for name in quiet)):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


def test_a_report_works_in_a_browser(page: Path, browser: Any) -> None:
    """Clicks through it; any error on the console fails."""
    from selenium.webdriver.common.by import By

    browser.get(page.as_uri())
    for link in browser.find_elements(By.CSS_SELECTOR, "nav a"):
        link.click()
    assert len(browser.find_elements(By.CSS_SELECTOR, ".main-svg")) >= 6
    place = browser.find_element(By.ID, "problems-table")
    percent = place.find_elements(By.TAG_NAME, "th")[0]

    def cells() -> list[str]:
        return [row.text for row in place.find_elements(By.CSS_SELECTOR, "td:nth-child(1)")]

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", percent)
    percent.click()
    rising = [float(text) for text in cells()]
    percent.click()
    assert [float(text) for text in cells()] == rising[::-1]
    assert percent.get_attribute("aria-sort") == "descending"
    place.find_element(By.TAG_NAME, "input").send_keys("no such problem")
    assert cells() == []
    assert browser.get_log("browser") == []


def test_a_report_shows_all_of_a_row_on_a_wide_screen(page: Path, browser: Any) -> None:
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    for place in ("nav", "#problems-table .scroll", "#kernels-table .scroll"):
        hidden = (
            f"const e = document.querySelector('{place}'); return e.scrollWidth - e.clientWidth"
        )
        assert browser.execute_script(hidden) <= 0, place


def test_a_report_fits_a_phone_in_the_dark(page: Path, browser: Any) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    seen = (
        "return document.querySelector('#problems-table td:nth-child(2)').getBoundingClientRect()"
    )
    assert browser.execute_script(seen)["right"] <= 390  # how good, and of which problem
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(18, 22, 29)"
