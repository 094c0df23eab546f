"""The precision monitor without a framework: readings of a run, their files, and the comparison of two runs."""
