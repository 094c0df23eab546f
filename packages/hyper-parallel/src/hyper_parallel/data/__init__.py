"""Training data: sources of tokens, the order of samples, packing, mixtures.

Every rank computes the rows of any step from the number of a global sample, so the position of a run is one number, and
any other number of ranks goes on from it.
"""

from hyper_parallel.data.contents import Content, contents
from hyper_parallel.data.errors import DataError
from hyper_parallel.data.opening import Opened, check_data, describe_cuts, has_tokens, open_data, open_samples
from hyper_parallel.data.order import permuted
from hyper_parallel.data.packing import Packed
from hyper_parallel.data.samples import IGNORED, Mixture, Rows, Samples, Windows
from hyper_parallel.data.text import VOCABULARY, check_text, find_files, read_text
from hyper_parallel.data.tokenization.tokens import TokenFile, write_tokens

__all__ = [
    "IGNORED",
    "VOCABULARY",
    "Content",
    "DataError",
    "Mixture",
    "Opened",
    "Packed",
    "Rows",
    "Samples",
    "TokenFile",
    "Windows",
    "check_data",
    "check_text",
    "contents",
    "describe_cuts",
    "find_files",
    "has_tokens",
    "open_data",
    "open_samples",
    "permuted",
    "read_text",
    "write_tokens",
]
