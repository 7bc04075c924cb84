"""The C++ of a row sum."""

from __future__ import annotations

from typing import Any

TEMPLATE = """\
// {name}
#include "row_sum.hpp"

extern "C" {{
__attribute__((visibility("default"))) int64_t tw_workspace(const row_sum_args*) {{ return 0; }}
__attribute__((visibility("default"))) int32_t tw_run(const row_sum_args* args) {{
  return sum_rows<{sums}>(*args);
}}
}}
"""


def source(kernel: Any) -> str:
    return TEMPLATE.format(name=kernel.name, sums=getattr(kernel, "sums", 1))
