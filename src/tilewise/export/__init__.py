"""A library that chooses and launches kernels without Python, written out as C++17."""
