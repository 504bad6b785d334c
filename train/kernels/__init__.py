"""Passes over memory as Triton kernels, each beside its plain twin."""
