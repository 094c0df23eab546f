"""fully_shard on MindSpore Cells, in PyNative mode.

For the differences to `hp_fsdp.torch` see Note [One function a group] in `hp_fsdp.mindspore.groups.group`.
"""
