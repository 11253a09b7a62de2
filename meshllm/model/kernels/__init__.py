"""Kernels, compiled for the processor or the GPU at hand."""
