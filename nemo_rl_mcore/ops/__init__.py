"""Kernels in pure torch: tensors and a process group in, tensors out."""
