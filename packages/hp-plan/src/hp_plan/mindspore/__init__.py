"""hp_plan on MindSpore: same file names as the other frameworks' folders."""
