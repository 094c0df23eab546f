"""hyper_parallel on PyTorch: same file names as the other frameworks' folders."""
