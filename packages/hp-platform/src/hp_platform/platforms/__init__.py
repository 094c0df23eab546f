"""This machine, who started its processes, and the framework and device in use."""
