"""hyper_parallel on MindSpore: same file names as the other frameworks' folders."""
