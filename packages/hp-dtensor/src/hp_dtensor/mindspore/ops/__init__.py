"""MindSpore kernels on DTensors: dispatch, plans, bindings and what runs on local tensors."""
