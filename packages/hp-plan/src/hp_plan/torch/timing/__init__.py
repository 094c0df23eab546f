"""Seconds of kernels and of this machine."""
