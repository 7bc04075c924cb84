"""ResNeXt-50 trained on a GPU by tilewise follows PyTorch.

PYTHONPATH=src python -m pytest tests/gpu/test_training_gpu.py -s -p no:cacheprovider
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import tilewise  # noqa: E402

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).parents[2] / "examples" / "resnext.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tilewise.__file__).parent.parent)}


def test_fifty_steps_follow_pytorchs_losses() -> None:
    command = [sys.executable, str(EXAMPLE), "50"]
    ended = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)
    losses = re.findall(r"loss ([\d.]+) by PyTorch, ([\d.]+) by tilewise", ended.stdout)
    assert float(losses[-1][0]) < 0.8 * float(losses[0][0]), "PyTorch learned nothing"
    apart = re.search(r"at most ([\d.]+)% of the first", ended.stdout)
    assert apart is not None and float(apart[1]) < 5, "bf16 rounds in another order, no more"
