"""What PyTorch does with a convolution on a CPU: hands it to oneDNN, or writes out columns.

It asks oneDNN only where a layer looks large, and of a volume it does not count the width. For all
others it copies every patch of the input into a column of a matrix, one number at a time and each
image by one thread, and multiplies that. Of volumes this copy takes most of the time.
"""

from __future__ import annotations

_IS_TORCH = 'k_library == "torch" and a_kind == "cpu" and p_dtype == "fp32"'
_IS_PLAIN = " and ".join(f"p_stride_{d} == 1 and p_dilation_{d} == 1" for d in "dhw")

TORCH_HELPERS = {
    "counted_sizes": "p_d * p_h if is_volume else p_h * p_w",
    "looks_large": "p_g > 1 or p_n > 1 or (p_y > 3 and p_x > 3) or p_c * counted_sizes > 20480",
    # A single thread multiplies 1x1 layers of few images itself.
    "is_own_product": f"a_compute_units == 1 and p_n < 16 and p_y * p_x == 1 and {_IS_PLAIN}",
    "is_unrolled": f"{_IS_TORCH} and (is_own_product or not looks_large)",
    "unrolled": "p_c * taps * out_pixels if is_unrolled else 0",
}
"""Which of PyTorch's routines serves; they say nothing of kernels."""

TORCH_FEATURES = {
    "unrolled_elements": "unrolled",
    "unrolled_per_mac": "unrolled / max(1, flops)",
}
