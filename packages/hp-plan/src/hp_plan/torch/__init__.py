"""hp_plan on PyTorch: same file names as the other frameworks' folders."""
