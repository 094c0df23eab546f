"""Training data: sources of tokens, the order of samples, packing, mixtures.

Every rank computes the rows of any step from the number of a global sample, so the position of a run is one number, and
any other number of ranks goes on from it.
"""

from hyper_parallel.data.documents import VOCABULARY, DataError, check_text, find_files, read_text
from hyper_parallel.data.opening import (
    Content,
    Opened,
    check_data,
    contents,
    describe_cuts,
    has_tokens,
    open_data,
    open_samples,
)
from hyper_parallel.data.packing import Packed
from hyper_parallel.data.samples import IGNORED, Mixture, Rows, Samples, Windows, permuted
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
