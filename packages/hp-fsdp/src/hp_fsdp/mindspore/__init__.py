"""fully_shard on MindSpore Cells, in PyNative mode.

What differs from `hp_fsdp.torch` is told in Note [One function a group] in `hp_fsdp.mindspore.unsharding`.
"""
