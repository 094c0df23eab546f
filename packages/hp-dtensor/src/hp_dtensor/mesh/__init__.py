"""The mesh: ranks arranged along named axes, its slices and its process groups."""
