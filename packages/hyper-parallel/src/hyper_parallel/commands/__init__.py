"""The commands of `hyper-parallel`."""
