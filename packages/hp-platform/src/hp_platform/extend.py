"""Names that other packages of this repository may import, beside the public ones."""

from __future__ import annotations

from hp_platform.communication.agreement import (
    agree,
    bytes_to_tensor,
    describe,
    gather_bytes,
    reduce_numbers,
    share_bytes,
    share_numbers,
    tensor_to_bytes,
)
from hp_platform.communication.carriers import carrier_of, run_unobserved, set_transport
from hp_platform.communication.checks import attribute_to, attributed_modules, observers
from hp_platform.communication.topology import Hosts, Level, hosts_of, level, level_of
from hp_platform.devices import CopyLink
from hp_platform.failures.debugging import TERMINAL, inspect_error, open_debugger
from hp_platform.failures.flight import Flight, beating, note_step, read_flight, record_flight
from hp_platform.failures.hangs import (
    ask_for_stacks,
    describe_hang,
    find_hang,
    has_ended,
    last_operation,
    process_state,
    send_signal,
)
from hp_platform.failures.listening import own_network
from hp_platform.failures.peers import FailedRankError
from hp_platform.groups import init_on_this_machine, own_rank, second_group, when_groups_end
from hp_platform.platforms.launchers import (
    Place,
    divide_threads,
    end_with_parent,
    inside_launcher,
    launch_command,
    launcher_place,
    leave_to_speaker,
    say_once,
    speaks_for_ranks,
    tell_torchrun,
    usable_cores,
    watch_parent,
)
from hp_platform.platforms.ports import (
    DEVICE,
    KINDS,
    PLATFORM,
    PLATFORMS,
    SettingError,
    lazy_exports,
    load_port,
    platform_name,
    wanted_platform,
)
from hp_platform.values import TreeSum, list_leaves, map_nested, subtrees, uncollected

__all__ = [
    "CopyLink",
    "DEVICE",
    "FailedRankError",
    "Flight",
    "Hosts",
    "KINDS",
    "Level",
    "PLATFORM",
    "PLATFORMS",
    "Place",
    "SettingError",
    "TERMINAL",
    "TreeSum",
    "agree",
    "ask_for_stacks",
    "attribute_to",
    "attributed_modules",
    "beating",
    "bytes_to_tensor",
    "carrier_of",
    "describe",
    "describe_hang",
    "end_with_parent",
    "find_hang",
    "gather_bytes",
    "has_ended",
    "hosts_of",
    "last_operation",
    "init_on_this_machine",
    "inside_launcher",
    "launch_command",
    "launcher_place",
    "inspect_error",
    "lazy_exports",
    "level",
    "level_of",
    "leave_to_speaker",
    "load_port",
    "divide_threads",
    "list_leaves",
    "usable_cores",
    "map_nested",
    "note_step",
    "observers",
    "open_debugger",
    "own_network",
    "own_rank",
    "platform_name",
    "process_state",
    "read_flight",
    "record_flight",
    "reduce_numbers",
    "run_unobserved",
    "say_once",
    "second_group",
    "send_signal",
    "set_transport",
    "speaks_for_ranks",
    "share_bytes",
    "share_numbers",
    "subtrees",
    "tell_torchrun",
    "tensor_to_bytes",
    "wanted_platform",
    "watch_parent",
    "when_groups_end",
    "uncollected",
]
