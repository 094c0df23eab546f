"""Autograd through DTensors on MindSpore."""
